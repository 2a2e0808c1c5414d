"""A FIFO queue: the tickets of one pool that have the same needs, and their positions. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from sortedcontainers import SortedList

from duplane.fabric.durations import to_seconds
from duplane.fabric.v1 import lease_pb2
from duplane.scheduler.policy.needs import NO_NEEDS, Needs
from duplane.scheduler.store.base import Ticket

AVOIDED_S = 15.0  # if a request does not say how long it avoids workers
# Maximum number of entries behind the front that one call of `next_moved` examines.
_SEARCHED_COUNT = 256


@dataclass(slots=True)
class QueueEntry:
    """A ticket that waits. `position` counts from 1 and never grows."""

    ticket: Ticket
    position: int  # the lowest position that was computed
    published: int  # the last position that `next_moved` returned
    since: float  # monotonic seconds
    avoids_until: float  # until then, the ticket does not get a worker that it avoids


class FifoQueue:
    """The tickets of one pool that have the same needs, sorted by their order numbers.

    Every operation costs O(log n) or less. Positions are computed when they are read, so the
    removal of a ticket takes no time for the tickets behind it. `next_moved` finds these tickets
    later, in portions.
    """

    def __init__(self, needs: Needs = NO_NEEDS) -> None:
        self.needs = needs
        self._entries: dict[int, QueueEntry] = {}
        self._orders: SortedList[int] = SortedList()
        self._orders_by_kind: dict[lease_pb2.SessionKind, SortedList[int]] = {}
        self._cursor: int | None = None  # order at which `next_moved` continues
        self._moved_from: int | None = None  # lowest order removed since the search began
        self._is_front_moved = False  # a ticket left since `next_moved` examined the front

    def __len__(self) -> int:
        return len(self._orders)

    def __iter__(self) -> Iterator[QueueEntry]:
        for rank, order in enumerate(self._orders, 1):
            yield self._ranked(order, rank)

    def get(self, order: int) -> QueueEntry | None:
        """Return the entry of a ticket, or None if the ticket is not in this queue."""
        if order not in self._entries:
            return None
        return self._ranked(order, self._orders.index(order) + 1)

    @property
    def first_order(self) -> int:
        """The order number of the first ticket. Raises IndexError if the queue is empty."""
        return self._orders[0]

    @property
    def orders_by_kind(self) -> Mapping[lease_pb2.SessionKind, SortedList[int]]:
        """For each kind with waiting tickets, the order numbers of these tickets."""
        return self._orders_by_kind

    def rank_in_kind(self, ticket: Ticket) -> int:
        """Return how many tickets of the same kind wait ahead of `ticket`."""
        return self._orders_by_kind[ticket.request.kind].bisect_left(ticket.order)

    def of_kinds(self, kinds: Collection[lease_pb2.SessionKind]) -> Iterator[Ticket]:
        """Yield the tickets of these kinds, first to last. The queue must not change meanwhile."""
        queues = (orders for kind, orders in self._orders_by_kind.items() if kind in kinds)
        return (self._entries[order].ticket for order in heapq.merge(*queues))

    def avoids_until(self, ticket: Ticket) -> float:
        """Return the time until which a ticket gets no slot of the workers that it avoids."""
        return self._entries[ticket.order].avoids_until

    def put(self, ticket: Ticket, now: float) -> None:
        """Add a ticket, or replace the ticket that has the same order number.

        A ticket that returns to the queue may have a lower order number than tickets that wait.
        Nevertheless, the `position` of these tickets does not grow.
        """
        if entry := self._entries.get(ticket.order):
            entry.ticket = ticket
            entry.avoids_until = _avoids_until(ticket, now)
            return
        position = self._orders.bisect_left(ticket.order) + 1
        self._orders.add(ticket.order)
        self._orders_by_kind.setdefault(ticket.request.kind, SortedList()).add(ticket.order)
        avoids_until = _avoids_until(ticket, now)
        self._entries[ticket.order] = QueueEntry(ticket, position, position, now, avoids_until)

    def remove(self, order: int) -> None:
        """Remove a ticket."""
        kind = self._entries.pop(order).ticket.request.kind
        self._orders.remove(order)
        self._orders_by_kind[kind].remove(order)
        if not self._orders_by_kind[kind]:
            del self._orders_by_kind[kind]
        self._is_front_moved = True
        if self._moved_from is None or order < self._moved_from:
            self._moved_from = order

    @property
    def has_moved(self) -> bool:
        """True if `next_moved` has entries left to examine."""
        return self._cursor is not None or self._moved_from is not None

    def next_moved(self, limit: int) -> Sequence[QueueEntry]:
        """Return at most `limit` entries that moved up, after a search of bounded length.

        The search examines the front of the queue, then continues where the previous call stopped.
        When a search has reached the last entry, the next search begins at the lowest order number
        that was removed meanwhile.
        """
        moved: list[QueueEntry] = []
        if self._is_front_moved:
            self._is_front_moved = False
            self._collect_moved(0, limit // 2, limit, moved)
        if self._cursor is None:
            self._cursor, self._moved_from = self._moved_from, None
        if self._cursor is not None:
            start = self._orders.bisect_left(self._cursor)
            end = self._collect_moved(start, start + _SEARCHED_COUNT, limit, moved)
            self._cursor = self._orders[end] if end < len(self._orders) else None
        return moved

    def _collect_moved(self, start: int, stop: int, limit: int, moved: list[QueueEntry]) -> int:
        """Append entries that moved up, from index `start`, until there are `limit` of them.

        Returns the index at which the search stopped.
        """
        for index, order in enumerate(self._orders.islice(start, stop), start):
            if len(moved) == limit:
                return index
            entry = self._ranked(order, index + 1)
            if entry.position < entry.published:
                entry.published = entry.position
                moved.append(entry)
        return stop

    def _ranked(self, order: int, rank: int) -> QueueEntry:
        entry = self._entries[order]
        entry.position = min(entry.position, rank)
        return entry


def _avoids_until(ticket: Ticket, now: float) -> float:
    request = ticket.request
    if not request.avoided_worker_ids:
        return now
    is_given = request.HasField("avoided_duration")
    return now + (to_seconds(request.avoided_duration) if is_given else AVOIDED_S)
