"""Graphs that are refused leave no trace; the tests of `tests/gpu` run real ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from duplane.tools.bench.launches import attend_to_pages
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

    cache.kernel = attend_to_pages

    def check(step: object, run: object, width: int) -> float:
        cache.extend([(slot, 3) for slot in range(width)])
        raise RuntimeError("no kernel image is available")

    found = graphs.StepGraphs[Any](cache, "LLM")
    found.capture(lambda width: SimpleNamespace(run=lambda: None), check)
    assert found.find(1) is None
    assert [cache.length(slot) for slot in range(2)] == [0, 0]
    (record,) = caplog.records
    assert record.getMessage() == (
        "2 of 2 CUDA graphs of the LLM are switched off, which costs speed: "
        "2 rows: no kernel image is available; 1 rows: no kernel image is available"
    )


def test_without_a_kernel_there_are_no_steps() -> None:
    cache = CONFIG.cache(2, 16, torch.device("cpu"), torch.float32)
    found = graphs.StepGraphs[Any](cache, "LLM")
    found.capture(lambda width: SimpleNamespace(run=lambda: None), lambda *_: 0.0)
    assert found.find(1) is None


@pytest.mark.parametrize(("count", "width"), [(1, 1), (2, 2), (3, 4), (5, 6), (6, 6)])
def test_the_smallest_step_with_room_is_found(count: int, width: int) -> None:
    cache = CONFIG.cache(6, 16, torch.device("cpu"), torch.float32)
    cache.kernel = attend_to_pages
    found = graphs.StepGraphs[Any](cache, "LLM")
    found.capture(
        lambda width: SimpleNamespace(run=lambda: None, width=width),
        lambda *_: 0.0,
        is_replayed=False,
    )
    step = found.find(count)
    assert step is not None
    assert step[0].width == width
