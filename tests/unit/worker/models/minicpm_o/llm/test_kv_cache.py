import pytest
import torch
from torch import Tensor

from duplane.worker.models.minicpm_o.llm import kv_cache as cache_module
from duplane.worker.models.minicpm_o.llm.kv_cache import CacheFullError, KVCache


def build(slots: int = 4, capacity: int = 8) -> KVCache:
    return KVCache(
        layers=2,
        slots=slots,
        heads=2,
        queries_per_head=3,
        capacity=capacity,
        head_dim=4,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )


def write(cache: KVCache, counts: list[tuple[int, int]], value: float) -> None:
    rows = cache.extend(counts)
    states = torch.full((len(rows.slots), 2, 4), value)
    for layer in range(2):
        cache.write(layer, rows, states, states)


def test_rows_follow_what_the_slot_holds() -> None:
    cache = build()
    write(cache, [(1, 2)], 1.0)
    rows = cache.extend([(0, 1), (1, 3), (3, 1)])
    assert rows.slots.tolist() == [0, 1, 1, 1, 3]
    assert rows.positions.tolist() == [0, 2, 3, 4, 0]
    assert rows.last.tolist() == [0, 3, 4]
    assert [cache.length(slot) for slot in range(4)] == [1, 5, 0, 1]


def test_evenly_spaced_slots_with_as_many_rows_attend_in_one_call() -> None:
    cache = build()
    write(cache, [(1, 3)], 1.0)
    first, second = cache.extend([(0, 2), (1, 2), (3, 2)]).groups
    assert (first.slots, first.rows, first.length) == (slice(0, 2, 1), slice(0, 4), 5)
    assert (second.slots, second.rows, second.length) == (slice(3, 4, 1), slice(4, 6), 2)
    assert first.mask is not None
    assert first.mask.shape == (2, 1, 6, 5)
    assert first.mask[:, 0, :2].isfinite().int().tolist() == [
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0]],
        [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]],
    ]
    (spaced,) = cache.extend([(0, 1), (2, 1)]).groups
    assert spaced.slots == slice(0, 3, 2)


def test_gathered_slots_attend_in_one_call_wherever_they_are() -> None:
    cache = build(slots=8)
    cache.is_gathering = True
    (group,) = cache.extend([(0, 3), (1, 4), (6, 4)]).groups
    assert isinstance(group.slots, Tensor)
    assert isinstance(group.rows, Tensor)
    assert group.slots.tolist() == [0, 1, 6]
    # The first slot has one row less, so its last row is repeated as padding.
    assert group.rows.tolist() == [0, 1, 2, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert group.mask is not None
    assert group.mask.shape == (3, 1, 12, 4)


def test_gathered_groups_are_bounded_in_padding_and_in_what_they_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = build(slots=8, capacity=40)
    cache.is_gathering = True
    few, many = cache.extend([(0, 1), (1, 30), (3, 1), (4, 20)]).groups
    assert [(group.slot_count, group.rows_per_slot) for group in (few, many)] == [(2, 1), (2, 30)]
    monkeypatch.setattr(cache_module, "GATHERED_BYTES", 2 * cache.layer_row_bytes)
    groups = cache.extend([(2, 1), (5, 1), (6, 1)]).groups
    assert [group.slot_count for group in groups] == [2, 1]


def test_one_row_of_slots_as_long_needs_no_mask() -> None:
    assert [group.mask for group in build().extend([(1, 1), (2, 1)]).groups] == [None]


def test_a_slot_without_room_changes_nothing_for_any() -> None:
    cache = build()
    write(cache, [(0, 8)], 1.0)
    with pytest.raises(CacheFullError, match="slot 0 holds 8 of 8"):
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
    assert bool((cache.keys[:, 2, :, :6] == 5).all())


def test_a_stray_value_makes_an_empty_slot_unclean() -> None:
    cache = build()
    cache.values[1, 3, 1, 7, 3] = 1e-20
    assert cache.is_clean(2)
    assert not cache.is_clean(3)


def test_only_what_is_held_can_be_kept() -> None:
    cache = build()
    with pytest.raises(ValueError, match="holds 0 rows, not 1"):
        cache.truncate(0, 1)


def keep(keys: torch.Tensor, source: int, target: int) -> torch.Tensor:
    return keys.clone()


def held(cache: KVCache, slot: int) -> list[float]:
    return cache.values[0, slot, 0, : cache.length(slot), 0].tolist()


@pytest.mark.parametrize("rows", [1, 2, 7, 256])
@pytest.mark.parametrize(("source", "target"), [(5, 2), (2, 5), (4, 3), (3, 3), (12, 0)])
def test_rows_move_in_place_whatever_overlaps(
    monkeypatch: pytest.MonkeyPatch, rows: int, source: int, target: int
) -> None:
    monkeypatch.setattr(cache_module, "MOVED_ROWS", rows)
    cache = build(capacity=16)
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
    keys = cache.keys[0, 2, 0, target : cache.length(2), 0].tolist()
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
    cache.restore(1, 6)
    assert held(cache, 1) == [1.0] * 6
    for length in (5, 7):
        with pytest.raises(ValueError, match="to restore"):
            cache.restore(1, length)
