"""Whose turn it is, which slot they get, and what a worker's report means for a grant.

Pure: facts in, decisions out. Strict FIFO per pool: nobody is served before the head, except past
a head that no worker of the pool can ever serve.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from duplane.fabric.v1 import lease_pb2, registry_pb2
from duplane.scheduler.store.base import Grant, Ticket, Worker


@dataclass(slots=True)
class Place:
    """A ticket in its queue; `position` counts from 1 and never grows."""

    ticket: Ticket
    position: int
    since: float  # monotonic seconds


class Queue:
    """The tickets of one pool, by order."""

    def __init__(self) -> None:
        self._orders: list[int] = []
        self._places: dict[int, Place] = {}

    def __len__(self) -> int:
        return len(self._orders)

    def __iter__(self) -> Iterator[Place]:
        return (self._places[order] for order in self._orders)

    def get(self, order: int) -> Place | None:
        """Return the place of a ticket, if it waits here."""
        return self._places.get(order)

    def put(self, ticket: Ticket, now: float) -> None:
        """Add a ticket at its order, or replace the one that waits there.

        One that comes back moves ahead of those behind it, whose positions stay as they were.
        """
        if place := self._places.get(ticket.order):
            place.ticket = ticket
            return
        index = bisect.bisect(self._orders, ticket.order)
        self._orders.insert(index, ticket.order)
        self._places[ticket.order] = Place(ticket, index + 1, now)

    def remove(self, order: int) -> Sequence[Place]:
        """Remove a ticket and return the places whose position fell."""
        index = bisect.bisect_left(self._orders, order)
        del self._orders[index], self._places[order]
        moved: list[Place] = []
        for position, behind in enumerate(self._orders[index:], index + 1):
            place = self._places[behind]
            if position < place.position:
                place.position = position
                moved.append(place)
        return moved


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A worker as far as grants are concerned. Compared by identity."""

    worker: Worker
    free_slots: tuple[int, ...]  # longest unused first
    last_number: int  # the highest fencing number given out for it or seen by it
    is_able: bool  # some slot of it can be granted, now or later

    @classmethod
    def of(cls, worker: Worker, grants: Mapping[int, Grant]) -> Candidate:
        """Look at a worker and the grants of its slots."""
        slots = worker.register.slots
        free = [
            (report.fencing_number, report.slot)
            for report in slots
            if report.state == registry_pb2.SLOT_STATE_FREE and report.slot not in grants
        ]
        numbers = [report.fencing_number for report in slots]
        numbers += [grant.token for grant in grants.values()]
        is_whole = any(report.state != registry_pb2.SLOT_STATE_BROKEN for report in slots)
        is_leaving = worker.is_draining or worker.is_drain_wanted
        return cls(
            worker=worker,
            free_slots=tuple(slot for _, slot in sorted(free)) if worker.takes_sessions else (),
            last_number=max(numbers, default=0),
            is_able=is_whole and not is_leaving,
        )

    def serves(self, kind: lease_pb2.SessionKind) -> bool:
        """Tell whether its model does what the kind needs."""
        return kind in self.worker.register.kinds


@dataclass(frozen=True, slots=True)
class Assignment:
    """The slot a ticket gets."""

    ticket: Ticket
    worker: Worker
    slot: int


def is_served(workers: Iterable[Worker], pool: str, kind: lease_pb2.SessionKind) -> bool:
    """Tell whether a worker is attached that serves the kind in the pool, draining or not."""
    registers = (worker.register for worker in workers)
    return any(register.pool == pool and kind in register.kinds for register in registers)


def assign(tickets: Iterable[Ticket], candidates: Sequence[Candidate]) -> list[Assignment]:
    """Give the free slots of one pool to the first of its tickets.

    Sessions are spread: most free slots first, then longest unused.
    """
    free = {candidate: list(candidate.free_slots) for candidate in candidates}
    free = {candidate: slots for candidate, slots in free.items() if slots}
    last_number = {candidate: candidate.last_number for candidate in free}
    assignments: list[Assignment] = []
    for ticket in tickets if free else ():
        kind = ticket.wish.kind
        able = [candidate for candidate, slots in free.items() if slots and candidate.serves(kind)]
        if able:
            chosen = min(able, key=lambda one: (-len(free[one]), last_number[one]))
            assignments.append(Assignment(ticket, chosen.worker, free[chosen].pop(0)))
            last_number[chosen] = max(last_number.values()) + 1
        elif any(candidate.is_able and candidate.serves(kind) for candidate in candidates):
            break
    return assignments


class Verdict(Enum):
    """What a slot's report means for the grant that stands for it here."""

    NOTHING = auto()
    CLAIMED = auto()  # the lease was accepted
    ENDED = auto()  # the lease no longer holds the slot, or never will
    UNKNOWN_LEASE = auto()  # a lease holds the slot that no grant here stands for


def judge(grant: Grant | None, report: registry_pb2.SlotReport) -> Verdict:
    """Compare what a worker says of a slot with the grant of it. The worker is the last word.

    A number at or above the grant's means that its lease was seen, or overtaken. Below it, the
    worker has not heard of the lease, and its report tells of the time before.
    """
    is_occupied = report.state == registry_pb2.SLOT_STATE_OCCUPIED
    if grant is None:
        return Verdict.UNKNOWN_LEASE if is_occupied else Verdict.NOTHING
    if is_occupied and report.lease_id == grant.lease_id:
        return Verdict.NOTHING if grant.is_claimed else Verdict.CLAIMED
    is_broken = report.state == registry_pb2.SLOT_STATE_BROKEN
    if grant.is_claimed or is_broken or report.fencing_number >= grant.token:
        return Verdict.ENDED
    return Verdict.NOTHING
