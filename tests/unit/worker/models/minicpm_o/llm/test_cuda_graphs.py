"""Graphs that are refused leave no trace; the tests of `tests/gpu` run real ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from duplane.worker.models.minicpm_o.blocks import graph
from duplane.worker.models.minicpm_o.llm import cuda_graphs as graphs
from duplane.worker.models.minicpm_o.llm.decoder import DecoderConfig

CONFIG = DecoderConfig(
    hidden_size=8,
    intermediate_size=8,
    layers=1,
    query_heads=2,
    key_heads=1,
    head_dim=4,
    rope_theta=50_000.0,
    norm_eps=1e-6,
    has_head_norm=True,
    has_attention_bias=False,
)


def test_a_check_that_raises_leaves_no_rows_in_its_slots(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(graph, "Graph", lambda call, pool: SimpleNamespace(pool=None, replay=call))
    cache = CONFIG.cache(2, 16, torch.device("cpu"), torch.float32)

    def check(step: object, run: object, width: int, length: int) -> float:
        cache.extend([(slot, 3) for slot in range(width)])
        raise RuntimeError("no kernel image is available")

    found = graphs.StepGraphs[Any](cache, "LLM")
    found.capture(lambda width, length: SimpleNamespace(run=lambda: None), check)
    assert found.find([0], 16) is None
    assert [cache.length(slot) for slot in range(2)] == [0, 0]
    (record,) = caplog.records
    assert record.getMessage() == (
        "2 of 2 CUDA graphs of the LLM are switched off, which costs speed: "
        "2 slots x 16 rows: no kernel image is available; "
        "1 slots x 16 rows: no kernel image is available"
    )
