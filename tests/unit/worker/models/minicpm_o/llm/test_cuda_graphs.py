"""Graphs that are refused leave no trace; the tests of `tests/gpu` run real ones."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from duplane.tools.bench.launches import attend_to_pages
from duplane.worker.models.minicpm_o.blocks import graph
from duplane.worker.models.minicpm_o.llm import cuda_graphs as graphs
from duplane.worker.models.minicpm_o.llm.attention import Tiles
from duplane.worker.models.minicpm_o.llm.decoder import Decoder, DecoderConfig
from duplane.worker.models.minicpm_o.llm.kv_cache import KVCache
from duplane.worker.models.minicpm_o.llm.language_model import split_rows

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


def cache_of(config: DecoderConfig, slots: int, capacity: int) -> KVCache:
    return Decoder(config, slots, capacity, torch.device("cpu"), torch.float32).cache


def make(size: int) -> Any:
    return SimpleNamespace(launch=lambda: None, size=size)


def test_a_check_that_raises_leaves_no_rows_in_its_slots(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(graph, "Graph", lambda call, pool: SimpleNamespace(pool=None, replay=call))
    cache = cache_of(CONFIG, 2, 16)

    cache.kernel = attend_to_pages

    def check(one: object) -> float:
        cache.extend([(slot, 3) for slot in range(2)])
        raise RuntimeError("no kernel image is available")

    found = graphs.PassGraphs[Any](cache, "LLM")
    found.capture((1, 2), make, check)
    assert found.find(1) is None
    assert [cache.length(slot) for slot in range(2)] == [0, 0]
    (record,) = caplog.records
    assert record.getMessage() == (
        "2 of 2 CUDA graphs of the LLM are switched off, which costs speed: "
        "2 rows: no kernel image is available; 1 rows: no kernel image is available"
    )


def test_without_a_kernel_there_are_no_passes() -> None:
    cache = cache_of(CONFIG, 2, 16)
    found = graphs.PassGraphs[Any](cache, "LLM")
    found.capture((1, 2), make, lambda _: 0.0)
    assert found.find(1) is None


@pytest.mark.parametrize(("rows", "size"), [(1, 4), (4, 4), (5, 32), (32, 32)])
def test_the_smallest_pass_with_room_is_found(rows: int, size: int) -> None:
    cache = cache_of(CONFIG, 6, 16)
    cache.kernel = attend_to_pages
    found = graphs.PassGraphs[Any](cache, "LLM")
    found.capture((32, 4), make, lambda _: 0.0, is_replayed=False)
    one = found.find(rows)
    assert one is not None
    assert one.size == size
    assert found.find(33) is None


@given(st.data(), st.sampled_from([(4, 4), (8, 3), (32, 4), (40, 4)]))
def test_the_numbers_of_a_pass_are_those_of_the_cache_and_padding(
    data: st.DataObject, size: tuple[int, int]
) -> None:
    """Rows of the slots are those that the cache plans; each padding row is on the scratch page."""
    most, slots = size
    cache = cache_of(replace(CONFIG, query_heads=16), 4, 600)
    cache.kernel = attend_to_pages
    chosen = sorted(data.draw(st.sets(st.integers(0, 3), min_size=1, max_size=slots)))
    starts = [data.draw(st.integers(0, 560)) for _ in chosen]
    counts = list[tuple[int, int]]()
    for left, slot in enumerate(reversed(chosen)):
        room = most - sum(count for _, count in counts) - (len(chosen) - 1 - left)
        counts.insert(0, (slot, data.draw(st.integers(1, room))))
    cache.grow([*zip(chosen, starts, strict=True)])
    form = graphs.PassForm(cache, most, slots)
    numbers = form.numbers(counts, starts)
    planned = cache.extend(counts)
    got = form.rows_of(torch.as_tensor(numbers))
    rows = sum(count for _, count in counts)
    assert len(numbers) == form.count
    assert torch.equal(got.positions[:rows], planned.positions)
    assert torch.equal(got.last[: len(counts)], planned.last)
    places = planned.places
    held = torch.arange(places.start, places.stop) if isinstance(places, slice) else places
    assert isinstance(got.places, torch.Tensor)
    assert torch.equal(got.places[:rows], held)
    assert torch.equal(got.places[rows:] // cache.pages.page_rows, padding(cache, most - rows))
    assert isinstance(got.plan, Tiles)
    assert isinstance(planned.plan, Tiles)
    assert torch.equal(got.plan.numbers[: len(planned.plan.numbers)], planned.plan.numbers)
    tiles = got.plan.numbers.tolist()
    covered = [first + row for _, first, count in tiles for row in range(count)]
    assert covered == list(range(most)), "each row has one tile"


def padding(cache: KVCache, rows: int) -> torch.Tensor:
    return torch.full((rows,), cache.pages.scratch)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 7), st.integers(1, 4))
def test_rows_are_split_into_passes_in_their_order(rows: list[int], most: int, slots: int) -> None:
    counts = list(enumerate(rows))
    parts = split_rows(counts, most, slots)
    assert [slot for part in parts for slot, count in part for _ in range(count)] == [
        slot for slot, count in counts for _ in range(count)
    ]
    for part in parts:
        assert sum(count for _, count in part) <= most
        assert len(part) <= slots
    for part, following in pairwise(parts):
        is_full = sum(count for _, count in part) == most or len(part) == slots
        assert is_full, (part, following)
