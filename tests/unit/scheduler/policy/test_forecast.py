"""The forecast: the expected waits of the tickets in a queue."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sortedcontainers import SortedList
from support.scheduler.scheduler_harness import AUDIO, CHAT, OMNI

from duplane.fabric.v1 import lease_pb2
from duplane.scheduler.policy.forecast import RESOLUTION, Demand, Supply, forecast
from duplane.scheduler.policy.hold_times import HoldTimes

ALL = frozenset({AUDIO, OMNI, CHAT})
NOW = 10_000.0


@dataclass
class SlotOutlook:
    """The kinds of session that a slot serves, and the expected seconds until it is free."""

    kinds: frozenset[lease_pb2.SessionKind]
    free_in_s: float

    def supply(self, times: HoldTimes) -> Supply:
        if not self.free_in_s:
            return Supply(1, {})
        since = NOW + self.free_in_s - times.expected_s(AUDIO)
        return Supply(0, {AUDIO: SortedList([since])})


def waits_s(
    kinds: Sequence[lease_pb2.SessionKind], slots: Sequence[SlotOutlook], times: HoldTimes
) -> list[float | None]:
    """Return the expected waits of tickets with these kinds, in the order of the queue."""
    demands = [
        Demand(
            kind,
            SortedList(order for order, one in enumerate(kinds) if one == kind),
            [index for index, slot in enumerate(slots) if kind in slot.kinds],
        )
        for kind in dict.fromkeys(kinds)
    ]
    waits = forecast(demands, [slot.supply(times) for slot in slots], times, NOW)
    by_kind = dict(zip(dict.fromkeys(kinds), waits, strict=True))
    ranks = {kind: itertools.count() for kind in by_kind}
    return [by_kind[kind].wait_s(next(ranks[kind])) for kind in kinds]


def test_tickets_use_the_slots_one_after_another() -> None:
    slots = [SlotOutlook(ALL, 10), SlotOutlook(ALL, 30)]
    assert waits_s([AUDIO] * 4, slots, HoldTimes()) == pytest.approx([10, 30, 130, 150])


def test_short_sessions_ahead_shorten_the_wait() -> None:
    assert waits_s([CHAT, AUDIO], [SlotOutlook(ALL, 5)], HoldTimes()) == [5, 20]


def test_no_ticket_starts_before_the_one_ahead() -> None:
    slots = [SlotOutlook(frozenset({OMNI}), 60), SlotOutlook(frozenset({CHAT}), 0)]
    assert waits_s([OMNI, CHAT], slots, HoldTimes()) == [60, 60]


def test_wait_for_a_kind_without_slots_is_unknown_and_delays_no_other() -> None:
    slots = [SlotOutlook(frozenset({CHAT}), 3)]
    assert waits_s([OMNI, CHAT], slots, HoldTimes()) == [None, 3]


@given(
    st.lists(st.sampled_from([AUDIO, OMNI, CHAT]), max_size=30),
    st.lists(st.floats(0, 600), min_size=1, max_size=8),
)
def test_waits_never_fall_along_the_queue(kinds: list[lease_pb2.SessionKind], free: list[float]):
    waits = waits_s(kinds, [SlotOutlook(ALL, seconds) for seconds in free], HoldTimes())
    known = [wait for wait in waits if wait is not None]
    assert len(known) == len(kinds)
    assert known == sorted(known)


def test_lines_do_not_wait_for_each_other_but_share_the_slots() -> None:
    supplies = [Supply(1, {}), Supply(1, {})]
    demands = [
        Demand(AUDIO, SortedList([1, 2]), [0], line="one"),
        Demand(CHAT, SortedList([3]), [1], line="other"),
        Demand(OMNI, SortedList([4]), [0, 1], line="any"),
    ]
    one, other, both = forecast(demands, supplies, HoldTimes(), NOW)
    assert [one.wait_s(0), one.wait_s(1), other.wait_s(0), both.wait_s(0)] == [0, 120, 0, 15]


@pytest.mark.parametrize(("ticket_count", "slot_count"), [(300, 7), (2000, 1000), (3000, 3000)])
def test_long_queues_are_forecast_nearly_as_exactly_as_short_ones(
    ticket_count: int, slot_count: int
) -> None:
    times = HoldTimes()
    free_s = [slot * 120 / slot_count for slot in range(1, slot_count + 1)]
    held = SortedList(NOW + free - 120 for free in free_s)
    demand = Demand(AUDIO, SortedList(range(ticket_count)), [0])
    (waits,) = forecast([demand], [Supply(0, {AUDIO: held})], times, NOW)
    assert not waits.is_exact
    heapq.heapify(free_s)
    for rank in range(ticket_count):
        assert waits.wait_s(rank) == pytest.approx(free_s[0], rel=0.05, abs=120 / 16)
        heapq.heapreplace(free_s, free_s[0] + 120)


def test_ticket_that_arrived_after_the_forecast_waits_as_long_as_the_last() -> None:
    demand = Demand(AUDIO, SortedList([1, 2]), [0])
    (waits,) = forecast([demand], [Supply(1, {})], HoldTimes(), NOW)
    assert [waits.wait_s(rank) for rank in range(4)] == [0, 120, 120, 120]


class CountingList(SortedList[Any]):
    """A list that counts how many of its elements are read."""

    read_count = 0

    def __getitem__(self, index: Any) -> Any:
        self.read_count += 1
        return super().__getitem__(index)


def test_forecast_reads_a_bounded_number_of_tickets_and_slots() -> None:
    orders: Any = CountingList(range(20_000))
    since: Any = CountingList(range(5_000))
    forecast([Demand(AUDIO, orders, [0])], [Supply(0, {AUDIO: since})], HoldTimes(), NOW)
    assert orders.read_count <= RESOLUTION
    assert since.read_count <= RESOLUTION
