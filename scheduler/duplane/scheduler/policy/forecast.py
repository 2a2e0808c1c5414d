"""Forecast of the waits in a queue, from how long slots are held. Pure.

The queue is simulated: one ticket after another takes the slot that becomes free first, and holds
this slot for the expected time of the ticket's kind. If there are many tickets or slots, neighbours
are simulated together as one portion. This bounds the cost of a forecast.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from sortedcontainers import SortedList

from duplane.fabric.v1 import lease_pb2
from duplane.scheduler.policy.hold_times import HoldTimes

_MAX_PORTIONS = 256  # maximum number of portions of the tickets of all demands together
# Maximum number of portions for the tickets of one `Demand`, and for the slots of a `Supply` that
# sessions of one kind hold.
RESOLUTION = 64
_Heap = list[tuple[float, int]]  # seconds until slots become free, and the number of these slots


@dataclass(frozen=True, slots=True)
class Supply:
    """Slots that can serve the same tickets."""

    idle_count: int  # slots without a session
    held_since: Mapping[lease_pb2.SessionKind, SortedList[float]]  # grant times of the other slots

    def outlook(self, times: HoldTimes, now: float) -> _Heap:
        """Return a heap of portions of slots, with the expected seconds until each is free."""
        heap = [(0.0, self.idle_count)] if self.idle_count else []
        for kind, since in self.held_since.items():
            for start, count in _portions(len(since)):
                held_s = now - since[start + count // 2]
                heap.append((times.remaining_s(kind, held_s), count))
        heapq.heapify(heap)
        return heap


class Ranks(Protocol):
    """The ranks of tickets among those of all demands, in their order."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> int: ...


@dataclass(frozen=True, slots=True)
class Demand:
    """Tickets of one kind that the same slots can serve."""

    kind: lease_pb2.SessionKind
    ranks: Ranks
    supplies: Collection[int]  # indices of the supplies that can serve these tickets
    line: Hashable = None  # tickets of all demands with the same line start in order


class Waits:
    """The waits of one demand's tickets.

    A ticket's rank counts the tickets ahead of it. A higher rank never has a shorter wait.
    """

    def __init__(self, ticket_count: int, resolution: int = RESOLUTION) -> None:
        self._size = _portion_size(ticket_count, resolution)
        self._bounds: list[tuple[float, float]] = []  # first and last wait of each portion

    @property
    def is_exact(self) -> bool:
        """True if each ticket was simulated individually."""
        return self._size == 1

    def add(self, first_s: float, last_s: float) -> None:
        """Append the waits of the next portion."""
        self._bounds.append((first_s, last_s))

    def wait_s(self, rank: int) -> float | None:
        """Return the wait of the ticket with this rank; None if no slot serves it."""
        if not self._bounds:
            return None
        portion, index = divmod(rank, self._size)
        if portion >= len(self._bounds):
            return self._bounds[-1][1]
        first_s, last_s = self._bounds[portion]
        return first_s + (last_s - first_s) * index / max(1, self._size - 1)


def forecast(
    demands: Sequence[Demand], supplies: Sequence[Supply], times: HoldTimes, now: float
) -> Sequence[Waits]:
    """Return the waits for each demand, in the order of `demands`."""
    heaps = [supply.outlook(times, now) for supply in supplies]
    resolution = max(1, min(RESOLUTION, _MAX_PORTIONS // max(1, len(demands))))
    waits = [Waits(len(demand.ranks), resolution) for demand in demands]
    started_s: dict[Hashable, float] = {}  # start of the last ticket of each line
    arrivals = (_arrivals(which, demand, resolution) for which, demand in enumerate(demands))
    for _, which, count in heapq.merge(*arrivals):
        demand = demands[which]
        able = [heaps[index] for index in demand.supplies if heaps[index]]
        if able:
            after_s = started_s.get(demand.line, 0.0)
            first_s, last_s = _start(able, count, after_s, times.expected_s(demand.kind))
            waits[which].add(first_s, last_s)
            started_s[demand.line] = last_s
    return waits


def _arrivals(which: int, demand: Demand, resolution: int) -> Iterator[tuple[int, int, int]]:
    """Divide a demand into portions of tickets; `which` is the index of the demand.

    Yields (rank of the first ticket, `which`, number of tickets) for each portion.
    """
    for start, count in _portions(len(demand.ranks), resolution):
        yield demand.ranks[start], which, count


def _start(
    heaps: Sequence[_Heap], count: int, after_s: float, hold_s: float
) -> tuple[float, float]:
    """Let `count` tickets take slots in order; return when the first and the last get theirs."""
    first_s = max(after_s, min(heap[0][0] for heap in heaps))
    left = count
    if count > 1:
        slot_count = sum(number for heap in heaps for _, number in heap)
        rounds, left = divmod(count - 1, slot_count)
        left += 1
        if rounds:  # whole rounds, in which every slot takes one ticket
            for heap in heaps:
                heap[:] = [
                    (max(free_s, after_s) + rounds * hold_s, number) for free_s, number in heap
                ]
    while left:
        heap = min(heaps, key=lambda heap: heap[0])
        free_s, number = heap[0]
        after_s = max(after_s, free_s)
        taken = min(left, number)
        heapq.heapreplace(heap, (after_s + hold_s, taken))
        if number > taken:
            heapq.heappush(heap, (free_s, number - taken))
        left -= taken
    return first_s, after_s


def _portions(count: int, resolution: int = RESOLUTION) -> Iterator[tuple[int, int]]:
    """Divide `count` items into at most `resolution` portions; yield start and length of each."""
    size = _portion_size(count, resolution)
    for start in range(0, count, size):
        yield start, min(size, count - start)


def _portion_size(count: int, resolution: int) -> int:
    return max(1, -(-count // resolution))
