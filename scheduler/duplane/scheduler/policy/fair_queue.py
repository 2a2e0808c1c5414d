"""A queue that is fair among tenants and FIFO within each, and the positions of tickets. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from duplane.fabric.durations import to_seconds
from duplane.fabric.v1 import lease_pb2
from duplane.scheduler.policy.needs import NO_NEEDS, Needs
from duplane.scheduler.policy.turns import Turns, merged, place
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


class FairQueue:
    """The tickets of one pool that have the same needs, in the order of `Turns`.

    Changes cost O(log n), and so do positions with few tenants; `Turns` says what they cost with
    many. Positions are computed when they are read, so the removal of a ticket takes no time for
    the tickets behind it. `next_moved` finds these tickets later, in portions.
    """

    def __init__(
        self, needs: Needs = NO_NEEDS, last_numbers: Mapping[str, int] | None = None
    ) -> None:
        """`last_numbers` has the fencing number of the last grant of each tenant, if known."""
        self.needs = needs
        empty: Mapping[str, int] = {}
        self._last_numbers = empty if last_numbers is None else last_numbers
        self._entries: dict[int, QueueEntry] = {}
        self._turns = Turns(self._last_numbers)
        self._turns_by_kind: dict[lease_pb2.SessionKind, Turns] = {}
        self._cursor: int | None = None  # rank at which `next_moved` continues
        self._moved_from: int | None = None  # lowest rank that moved up since the search began
        self._is_front_moved = False  # a ticket left since `next_moved` examined the front

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[QueueEntry]:
        for rank, order in enumerate(self._turns, 1):
            yield self._ranked(order, rank)

    def get(self, order: int) -> QueueEntry | None:
        """Return the entry of a ticket, or None if the ticket is not in this queue."""
        if order not in self._entries:
            return None
        return self._ranked(order, self._turns.rank(order) + 1)

    def first_order(self, reserved: Collection[int] = ()) -> int | None:
        """Return the order number of the first ticket that is not `reserved`."""
        return next((order for order in self._turns if order not in reserved), None)

    @property
    def turns_by_kind(self) -> Mapping[lease_pb2.SessionKind, Turns]:
        """For each kind with waiting tickets, the order of these tickets."""
        return self._turns_by_kind

    def rank_in_kind(self, ticket: Ticket) -> int:
        """Return how many tickets of the same kind wait ahead of `ticket`."""
        return self._turns_by_kind[ticket.request.kind].rank(ticket.order)

    def of_kinds(self, kinds: Collection[lease_pb2.SessionKind]) -> Iterator[Ticket]:
        """Yield the tickets of these kinds, first to last. The queue must not change meanwhile."""
        chosen = [turns for kind, turns in self._turns_by_kind.items() if kind in kinds]
        is_whole = len(chosen) == len(self._turns_by_kind)
        orders = self._turns if is_whole else merged(chosen)
        return (self._entries[order].ticket for order in orders)

    def avoids_until(self, ticket: Ticket) -> float:
        """Return the time until which a ticket gets no slot of the workers that it avoids."""
        return self._entries[ticket.order].avoids_until

    def put(self, ticket: Ticket, now: float) -> None:
        """Add a ticket, or replace the ticket that has the same order number.

        The ticket may come before tickets that wait: if it returns to the queue, or if its tenant
        is next. Nevertheless, the `position` of these tickets does not grow.
        """
        avoids_until = _avoids_until(ticket, now)
        if entry := self._entries.get(ticket.order):
            if place(ticket) != place(entry.ticket):
                self._leave(entry.ticket)
                self._join(ticket)
            entry.ticket = ticket
            entry.avoids_until = avoids_until
            return
        position = self._join(ticket) + 1
        self._entries[ticket.order] = QueueEntry(ticket, position, position, now, avoids_until)

    def remove(self, order: int) -> None:
        """Remove a ticket."""
        self._leave(self._entries.pop(order).ticket)

    def renew(self, tenant_id: str) -> bool:
        """Let a tenant that has got a grant come after the others.

        Returns True if `next_moved` has entries left to examine.
        """
        for turns in self._turns_by_kind.values():
            turns.renew(tenant_id)
        rank = self._turns.renew(tenant_id)
        if rank is not None:
            self._note_moved(rank)
        return self.has_moved

    def _join(self, ticket: Ticket) -> int:
        """Add a ticket to the order; return its rank."""
        kind = ticket.request.kind
        if kind not in self._turns_by_kind:
            self._turns_by_kind[kind] = Turns(self._last_numbers)
        self._turns_by_kind[kind].add(ticket)
        self._turns.add(ticket)
        rank = self._turns.rank(ticket.order)
        if self._cursor is not None and rank < self._cursor:
            self._cursor += 1
        return rank

    def _leave(self, ticket: Ticket) -> None:
        """Remove a ticket from the order."""
        rank = self._turns.rank(ticket.order)
        kind, order = ticket.request.kind, ticket.order
        self._turns.remove(order)
        self._turns_by_kind[kind].remove(order)
        if not len(self._turns_by_kind[kind]):
            del self._turns_by_kind[kind]
        if self._cursor is not None and rank < self._cursor:
            self._cursor -= 1
        self._note_moved(rank)

    def _note_moved(self, rank: int) -> None:
        self._is_front_moved = True
        if self._moved_from is None or rank < self._moved_from:
            self._moved_from = rank

    @property
    def has_moved(self) -> bool:
        """True if `next_moved` has entries left to examine."""
        return self._cursor is not None or self._moved_from is not None

    def next_moved(self, limit: int) -> Sequence[QueueEntry]:
        """Return at most `limit` entries that moved up, after a search of bounded length.

        The search examines the front of the queue, then continues where the previous call stopped.
        When a search has reached the last entry, the next search begins at the lowest rank that
        moved meanwhile.
        """
        moved: list[QueueEntry] = []
        if self._is_front_moved:
            self._is_front_moved = False
            self._collect_moved(0, limit // 2, limit, moved)
        if self._cursor is None:
            self._cursor, self._moved_from = self._moved_from, None
        if self._cursor is not None:
            end = self._collect_moved(self._cursor, self._cursor + _SEARCHED_COUNT, limit, moved)
            self._cursor = end if end < len(self) else None
        return moved

    def _collect_moved(self, start: int, stop: int, limit: int, moved: list[QueueEntry]) -> int:
        """Append entries that moved up, from rank `start`, until there are `limit` of them.

        Returns the rank at which the search stopped.
        """
        orders = itertools.islice(self._turns.islice(start), stop - start)
        for rank, order in enumerate(orders, start):
            if len(moved) == limit:
                return rank
            entry = self._ranked(order, rank + 1)
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
