"""The kernels beside their forms in torch, on a CPU; `test_kernels.py` runs these tests.

Triton decides when it is imported whether it interprets kernels, so a process of its own runs them.
"""

from __future__ import annotations

import random as numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.model.decoders import QWEN

from duplane.worker.models.minicpm_o.llm import kv_cache, operations
from duplane.worker.models.minicpm_o.llm.decoder import Decoder
from duplane.worker.models.minicpm_o.llm.kv_cache import KVCache
from duplane.worker.models.minicpm_o.llm.triton_kernels import attend, place_heads, silu_times_up

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
"""The interpreter cuts float32 off to bfloat16, where a device rounds."""
DTYPES = list(TOLERANCES)


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=10)
@given(st.integers(1, 4), st.integers(1, 2100), st.sampled_from(DTYPES), st.integers(0, 9))
def test_silu_times_up_is_that_of_torch(
    rows: int, inner: int, dtype: torch.dtype, seed: int
) -> None:
    states = (4 * random(seed, rows, 2 * inner)).to(dtype)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(
        silu_times_up(states), operations.silu_times_up(states), rtol=tolerance, atol=1e-6
    )
    alone = torch.cat([silu_times_up(row) for row in states.split(1)])
    assert torch.equal(silu_times_up(states), alone)


@settings(max_examples=8)
@given(
    st.integers(1, 4),
    st.sampled_from([(2, 3, 16), (1, 4, 12), (3, 1, 24)]),
    st.sampled_from(DTYPES),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_placed_heads_are_those_of_torch_and_no_bit_depends_on_the_company(
    rows: int,
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    has_norm: bool,
    order: numbers.Random,
) -> None:
    key_heads, group, width = sizes
    heads = (3 * random(rows, rows, (group + 2) * key_heads, width)).to(dtype)
    angles = random(1, rows, 1, width), random(2, rows, 1, width)
    norms = None
    if has_norm:
        norms = (
            torch.nn.RMSNorm(width, 1e-6, dtype=dtype),
            torch.nn.RMSNorm(width, 1e-6, dtype=dtype),
        )
        for seed, norm in enumerate(norms):
            norm.requires_grad_(False).weight.copy_(random(3 + seed, width))
    places = torch.tensor(order.sample(range(40), rows))

    def placed(
        place: Callable[..., torch.Tensor], part: slice, at: torch.Tensor
    ) -> list[torch.Tensor]:
        """Return queries, and all rows of the pools."""
        pools = torch.zeros(2, key_heads, 40, width, dtype=dtype)
        own = angles[0][part], angles[1][part]
        return [place(heads[part], norms, own, at, *pools), *pools]

    got = placed(place_heads, slice(None), places)
    for one, plain in zip(got, placed(operations.place_heads, slice(None), places), strict=True):
        torch.testing.assert_close(one, plain, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
    for row in range(rows):
        elsewhere = torch.tensor([39 - places[row]])
        queries, *pools = placed(place_heads, slice(row, row + 1), elsewhere)
        assert torch.equal(queries[0], got[0][row])
        for alone, together in zip(pools, got[1:], strict=True):
            assert torch.equal(alone[:, elsewhere], together[:, places[row : row + 1]])


PAGE_ROWS, SPLIT, SLOTS, CAPACITY = 16, 32, 6, 130
ATTENDED = {torch.float32: 1e-5, torch.float16: 2e-3}
"""Tolerances by dtype. The interpreter cannot multiply matrices in bfloat16."""


@dataclass(frozen=True)
class Context:
    """A context: the seed of its rows, the rows before a pass, and those of the pass."""

    seed: int
    before: int
    rows: int


def attended(
    contexts: Mapping[int, Context], sizes: tuple[int, int, int], dtype: torch.dtype, pages: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend in one pass, with the kernel and in torch; `contexts` are by slot.

    `sizes` are key heads, query heads of each and their width; `pages` is a seed that decides which
    pages the slots get.
    """
    heads, group, width = sizes
    cache = KVCache(
        layers=2,
        slots=SLOTS,
        heads=heads,
        queries_per_head=group,
        capacity=CAPACITY,
        head_dim=width,
        device=torch.device("cpu"),
        dtype=dtype,
    )
    needed = -(-CAPACITY // PAGE_ROWS) * len(contexts)
    cache.pages.free = {*numbers.Random(pages).sample(range(cache.pages.scratch), needed)}
    heads_of_row = heads * (group + 2)
    states = {
        slot: random(one.seed, one.before + one.rows, heads_of_row, width).to(dtype)
        for slot, one in contexts.items()
    }
    split = partial(torch.split, split_size_or_sections=[heads * group, heads, heads], dim=1)
    for slot, one in contexts.items():
        if one.before:
            _, keys, values = split(states[slot][: one.before])
            cache.write(1, cache.extend([(slot, one.before)]), keys, values)
    counts = [(slot, contexts[slot].rows) for slot in sorted(contexts)]
    queries, keys, values = split(torch.cat([states[slot][-rows:] for slot, rows in counts]))
    rows = cache.extend(counts)
    cache.write(1, rows, keys, values)
    plain = cache.attend(1, rows, queries)
    for slot, count in counts:
        cache.truncate(slot, cache.length(slot) - count)
    cache.kernel = partial(attend, split=SPLIT)
    return cache.attend(1, cache.extend(counts), queries), plain


@pytest.fixture(autouse=True)
def _short_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "PAGE_ROWS", PAGE_ROWS)


contexts = st.builds(
    Context, st.integers(0, 99), st.integers(0, 90), st.one_of(st.just(1), st.integers(1, 12))
)


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(st.integers(0, SLOTS - 1), contexts, min_size=1, max_size=3),
    st.sampled_from([(2, 3, 16), (1, 4, 32), (3, 1, 24), (1, 1, 8)]),
    st.sampled_from([*ATTENDED]),
    st.integers(0, 99),
    st.integers(0, SLOTS - 1),
)
def test_attention_is_that_of_torch_and_no_bit_depends_on_the_company(
    contexts: dict[int, Context],
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    pages: int,
    other: int,
) -> None:
    got, plain = attended(contexts, sizes, dtype, pages)
    torch.testing.assert_close(got, plain, rtol=ATTENDED[dtype], atol=ATTENDED[dtype])
    first = 0
    for slot in sorted(contexts):
        one = contexts[slot]
        alone, _ = attended({other: one}, sizes, dtype, pages + 1)
        assert torch.equal(got[first : first + one.rows], alone)
        first += one.rows


@pytest.mark.parametrize("dtype", ATTENDED)
def test_all_kernels_are_accepted(dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    decoder = Decoder(QWEN, 2, CAPACITY, torch.device("cpu"), dtype)
    decoder.use_kernels("LLM")
    assert not caplog.records
    assert decoder.cache.kernel is attend
    assert decoder.operations.silu_times_up is silu_times_up
    assert decoder.operations.place_heads is place_heads
    assert not decoder.cache.keys.any()
