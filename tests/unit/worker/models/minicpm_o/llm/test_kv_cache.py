from collections.abc import Sequence

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.model.pages import mix_pages
from torch import Tensor

from duplane.worker.models.minicpm_o.llm import kv_cache as cache_module
from duplane.worker.models.minicpm_o.llm.attention import Call, Tiles
from duplane.worker.models.minicpm_o.llm.kv_cache import KVCache
from duplane.worker.models.minicpm_o.llm.pages import CacheFullError


@pytest.fixture(autouse=True)
def _short_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "PAGE_ROWS", 4)


def build(slots: int = 4, capacity: int = 8, share: float = 1.0) -> KVCache:
    return KVCache(
        layers=2,
        slots=slots,
        heads=2,
        queries_per_head=3,
        capacity=capacity,
        head_dim=4,
        device=torch.device("cpu"),
        dtype=torch.float32,
        share=share,
    )


def write(cache: KVCache, counts: list[tuple[int, int]], value: float) -> None:
    rows = cache.extend(counts)
    states = torch.full((len(rows.positions), 2, 4), value)
    for layer in range(2):
        cache.write(layer, rows, states, states)


def calls(cache: KVCache, counts: list[tuple[int, int]]) -> Sequence[Call]:
    plan = cache.extend(counts).plan
    assert not isinstance(plan, Tiles)
    return plan


def test_rows_follow_what_the_slot_holds() -> None:
    cache = build()
    write(cache, [(1, 2)], 1.0)
    rows = cache.extend([(0, 1), (1, 3), (3, 1)])
    assert isinstance(rows.places, Tensor)
    assert rows.places.tolist() == [0, 10, 11, 12, 24]
    assert rows.positions.tolist() == [0, 2, 3, 4, 0]
    assert rows.last.tolist() == [0, 3, 4]
    assert [cache.length(slot) for slot in range(4)] == [1, 5, 0, 1]


def test_each_slot_attends_to_the_rows_up_to_its_own() -> None:
    cache = build()
    write(cache, [(1, 3)], 1.0)
    first, second = calls(cache, [(0, 1), (1, 2)])
    assert (first.rows, first.places, first.mask) == (slice(0, 1), slice(0, 1), None)
    assert (second.rows, second.places) == (slice(1, 3), slice(8, 13))
    assert second.mask is not None
    assert second.mask.isfinite().int().tolist() == 3 * [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]


def test_contexts_in_pages_that_are_no_neighbours_are_copied() -> None:
    cache = build()
    cache.pages.free -= {1, 2, 3}
    write(cache, [(0, 6)], 1.0)
    assert cache.pages.held[0] == [0, 4]
    apart, whole = calls(cache, [(0, 1), (3, 1)])
    assert isinstance(apart.places, Tensor)
    assert apart.places.tolist() == [0, 1, 2, 3, 16, 17, 18]
    assert whole.places == slice(24, 25)


def test_a_slot_without_room_changes_nothing_for_any() -> None:
    cache = build()
    write(cache, [(0, 8)], 1.0)
    with pytest.raises(CacheFullError, match="slot 0 has 8 rows at most, not 9"):
        cache.extend([(0, 1), (1, 1)])
    assert [cache.length(slot) for slot in range(4)] == [8, 0, 0, 0]


@pytest.mark.parametrize("counts", [[(1, 1), (0, 1)], [(1, 1), (1, 1)]])
def test_slots_must_ascend(counts: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="ascending"):
        build().extend(counts)


def test_reset_zeroes_rows_that_were_forgotten_before_too() -> None:
    cache = build()
    write(cache, [(1, 6), (2, 6)], 5.0)
    cache.truncate(1, 2)
    assert not cache.is_clean(1)
    cache.reset(1)
    assert cache.is_clean(1)
    assert cache.length(1) == 0
    assert cache.length(2) == 6
    assert bool((cache.read(2)[0] == 5).all())


def test_only_what_is_held_can_be_kept() -> None:
    cache = build()
    with pytest.raises(ValueError, match="holds 0 rows, not 1"):
        cache.truncate(0, 1)


def keep(keys: torch.Tensor, source: int, target: int) -> torch.Tensor:
    return keys.clone()


def held(cache: KVCache, slot: int) -> list[float]:
    return cache.read(slot)[1][0, 0, :, 0].tolist()


@pytest.mark.parametrize("are_scattered", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 7, 256])
@pytest.mark.parametrize(("source", "target"), [(5, 2), (2, 5), (4, 3), (3, 3), (12, 0)])
def test_rows_move_in_place_whatever_overlaps(
    monkeypatch: pytest.MonkeyPatch, rows: int, source: int, target: int, are_scattered: bool
) -> None:
    monkeypatch.setattr(cache_module, "MOVED_ROWS", rows)
    cache = build(capacity=16)
    if are_scattered:
        cache.pages.free -= {9, 10}
    for value in range(12):
        write(cache, [(2, 1)], float(value))
    turned: list[tuple[int, int]] = []

    def turn(keys: Tensor, source: int, target: int) -> torch.Tensor:
        turned.append((target - source, keys.shape[2]))
        return keys + 100

    before = held(cache, 2)
    cache.move(2, source, target, turn)
    after = held(cache, 2)
    assert after[target:] == before[source:]
    assert after[: min(source, target)] == before[: min(source, target)]
    keys = cache.read(2)[0][0, 0, target:, 0].tolist()
    assert keys == [value + 100 for value in before[source:]]
    assert {offset for offset, _ in turned} <= {target - source}
    assert sum(count for _, count in turned) == 12 - source
    assert max((count for _, count in turned), default=0) <= rows
    cache.reset(2)
    assert cache.is_clean(2)


def test_a_move_that_does_not_fit_changes_nothing() -> None:
    cache = build()
    write(cache, [(1, 6)], 1.0)
    with pytest.raises(CacheFullError):
        cache.move(1, 2, 5, keep)
    with pytest.raises(ValueError, match="no rows to move"):
        cache.move(1, 7, 5, keep)
    assert held(cache, 1) == [1.0] * 6


def test_only_rows_that_were_written_can_be_restored() -> None:
    cache = build()
    write(cache, [(1, 6)], 1.0)
    cache.truncate(1, 2)
    cache.rewind(1, 6)
    assert held(cache, 1) == [1.0] * 6
    for slot, length in ((1, 7), (0, 1)):
        with pytest.raises(ValueError, match=f"slot {slot} never had {length} rows"):
            cache.rewind(slot, length)


def test_one_slot_has_room_for_a_whole_context_beside_reservations() -> None:
    cache = build(capacity=32, share=0.5)
    for slot in range(3):
        cache.hold(slot, 16)
    assert [cache.room(slot) for slot in range(4)] == [32] * 4
    cache.hold(1, 20)
    assert [cache.room(slot) for slot in range(4)] == [28, 32, 28, 28]
    cache.reset(1)
    cache.hold(3, 32)
    assert [cache.room(slot) for slot in range(4)] == [16, 16, 16, 32]
    with pytest.raises(CacheFullError, match="1 pages of memory are needed, 0 are spare"):
        cache.hold(0, 17)


steps = st.tuples(
    st.sampled_from(["extend", "extend", "both", "hold", "truncate", "move", "reset"]),
    st.integers(0, 3),
    st.integers(1, 12),
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(steps, max_size=12), st.booleans(), st.sampled_from([0.25, 0.5, 1.0]))
def test_each_page_is_free_and_zero_or_in_one_table(
    done: list[tuple[str, int, int]], are_mixed: bool, share: float
) -> None:
    """Slots keep their rows, and the pages that are reserved for them, while other slots change."""
    cache = build(capacity=16, share=share)
    if are_mixed:
        mix_pages(cache)
    rows: list[list[float]] = [[] for _ in range(4)]
    for number, (what, slot, count) in enumerate(done, 1):
        length = cache.length(slot)
        if what in ("extend", "both"):
            slots = [slot, slot + 1] if what == "both" and slot < 3 else [slot]
            if extend(cache, slots, count, float(number)):
                for each in slots:
                    rows[each] += [float(number)] * count
        elif what == "hold":
            cache.hold(slot, min(count, cache.room(slot)))
        elif what == "truncate":
            cache.truncate(slot, min(length, count))
            del rows[slot][count:]
        elif what == "move" and count <= length:
            cache.move(slot, count, count // 2, keep)
            del rows[slot][count // 2 : count]
            needed = -(-cache.length(slot) // 4)
            assert len(cache.pages.held[slot]) <= max(cache.pages.reserved, needed)
        elif what == "reset":
            cache.reset(slot)
            rows[slot].clear()
            assert cache.is_clean(slot)
        check_pages(cache)
        assert [held(cache, slot) for slot in range(4)] == rows


def extend(cache: KVCache, slots: Sequence[int], count: int, value: float) -> bool:
    """Write rows to slots if there is room; return whether there was."""
    lengths = [cache.length(slot) + count for slot in slots]
    pages, reserved = cache.pages, cache.pages.reserved
    borrowed = [
        max(0, -(-length // 4) - max(reserved, len(pages.held[slot])))
        for slot, length in zip(slots, lengths, strict=True)
    ]
    has_room = max(lengths) <= cache.capacity and sum(borrowed) <= pages.spare
    if len(slots) == 1:
        assert has_room == (lengths[0] <= cache.room(slots[0]))
    if has_room:
        write(cache, [(slot, count) for slot in slots], value)
        return True
    with pytest.raises(CacheFullError):
        cache.extend([(slot, count) for slot in slots])
    return False


def check_pages(cache: KVCache) -> None:
    pages = cache.pages
    owed = [max(0, pages.reserved - len(held)) for held in pages.held]
    assert sum(owed) <= len(pages.free)
    used = [page for held in pages.held for page in held]
    assert sorted([*used, *pages.free]) == list(range(pages.scratch))
    for page in pages.free:
        rows = slice(page * pages.page_rows, (page + 1) * pages.page_rows)
        assert not cache.keys[:, :, rows].any()
        assert not cache.values[:, :, rows].any()
    for line, held in zip(pages.table.tolist(), [*pages.held, []], strict=True):
        assert line == [*held, *[pages.scratch] * (pages.per_slot - len(held))]
