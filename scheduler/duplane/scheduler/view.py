"""What one scheduler knows: the store's facts, indexed for policy, and since when it knows them.

Changed by the store's changes alone, so that what is decided from it is the same in every
scheduler of a fabric. Decides nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import assert_never

from duplane.fabric.v1 import registry_pb2
from duplane.scheduler.estimate import HoldTimes, Outlook, waits_s
from duplane.scheduler.policy import Candidate, Place, Queue
from duplane.scheduler.store.base import (
    Change,
    End,
    Grant,
    GrantGone,
    GrantPut,
    Ticket,
    TicketGone,
    TicketPut,
    Wish,
    Worker,
    WorkerGone,
    WorkerPut,
)

_FORECAST_AGE_S = 1.0  # the queue is played through again after this, or when it has changed


class _Forecast:
    """The waits of one pool's tickets, by order, as of a moment."""

    def __init__(self, revision: int, now: float, waits: Mapping[int, float | None]) -> None:
        self._revision = revision
        self._deadline = now + _FORECAST_AGE_S
        self.waits = waits

    def is_fresh(self, revision: int, now: float) -> bool:
        return revision == self._revision and now < self._deadline


class View:
    """The fabric as this scheduler sees it. `listener` is told each change after it is applied,
    with the places whose position fell by it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.revision = 0
        self.workers: dict[str, Worker] = {}
        self.tickets: dict[int, Ticket] = {}  # by order
        self.grants: dict[str, Grant] = {}  # by lease id, oldest first
        self.wishes: dict[str, Wish] = {}  # that wait or hold a grant, by request id
        self.candidates: dict[str, Candidate] = {}  # by worker id
        self.hold_times = HoldTimes()
        self.listeners: list[Callable[[Change, Sequence[Place]], None]] = []
        self._queues: dict[str, Queue] = {}
        self._slots: dict[str, dict[int, Grant]] = {}  # by worker id
        self._worker_since: dict[str, float] = {}
        self._grant_since: dict[str, float] = {}
        self._forecasts: dict[str, _Forecast] = {}

    def apply(self, change: Change) -> None:
        """Take in one change of the store."""
        self.revision = max(self.revision, change.revision)
        moved: Sequence[Place] = ()
        match change:
            case WorkerPut(worker=worker):
                self._put_worker(worker)
            case WorkerGone(worker=worker):
                self._remove_worker(worker)
            case TicketPut(ticket=ticket):
                self._put_ticket(ticket)
            case TicketGone(ticket=ticket, is_granted=is_granted):
                moved = self._remove_ticket(ticket, is_granted)
            case GrantPut(grant=grant):
                self._put_grant(grant)
            case GrantGone(grant=grant, end=end):
                self._remove_grant(grant, end)
            case _:
                assert_never(change)
        for listener in self.listeners:
            listener(change, moved)

    @property
    def pools(self) -> Sequence[str]:
        """The pools in which somebody waits."""
        return tuple(self._queues)

    def places(self) -> Sequence[Place]:
        """Every place, of all pools, next first."""
        every = itertools.chain.from_iterable(self._queues.values())
        return sorted(every, key=lambda place: place.ticket.order)

    def queue(self, pool: str) -> Iterator[Ticket]:
        """Yield the tickets of a pool, next first."""
        return (place.ticket for place in self._queues.get(pool, ()))

    def queue_length(self, pool: str) -> int:
        """How many wait in a pool."""
        return len(self._queues.get(pool, ()))

    def place(self, pool: str, order: int) -> Place | None:
        """Return the place of a ticket that waits."""
        queue = self._queues.get(pool)
        return queue.get(order) if queue else None

    def pool_candidates(self, pool: str) -> Sequence[Candidate]:
        """Return the workers that serve a pool."""
        every = self.candidates.values()
        return [candidate for candidate in every if candidate.worker.register.pool == pool]

    def grant_of(self, worker_id: str, slot: int) -> Grant | None:
        """Return the grant of a slot."""
        return self._slots.get(worker_id, {}).get(slot)

    def attached_s(self, worker_id: str) -> float:
        """How long a worker has been registered."""
        return self.clock() - self._worker_since[worker_id]

    def held_s(self, lease_id: str) -> float:
        """How long ago a lease was granted, or told of."""
        return self.clock() - self._grant_since[lease_id]

    def wait_s(self, ticket: Ticket) -> float | None:
        """Guess how long a ticket will wait; None while no slot will serve it."""
        pool, now = ticket.wish.pool, self.clock()
        forecast = self._forecasts.get(pool)
        if forecast is None or not forecast.is_fresh(self.revision, now):
            forecast = _Forecast(self.revision, now, self._play(pool))
            self._forecasts[pool] = forecast
        return forecast.waits.get(ticket.order)

    def _play(self, pool: str) -> Mapping[int, float | None]:
        tickets = list(self.queue(pool))
        kinds = (ticket.wish.kind for ticket in tickets)
        waits = waits_s(kinds, self._outlooks(pool), self.hold_times)
        return dict(zip((ticket.order for ticket in tickets), waits, strict=True))

    def _outlooks(self, pool: str) -> Iterator[Outlook]:
        for candidate in self.pool_candidates(pool):
            kinds = frozenset(candidate.worker.register.kinds)
            for report in candidate.worker.register.slots if candidate.is_able else ():
                if report.state != registry_pb2.SLOT_STATE_BROKEN:
                    yield Outlook(kinds, self._free_in_s(candidate.worker.worker_id, report))

    def _free_in_s(self, worker_id: str, report: registry_pb2.SlotReport) -> float:
        if grant := self.grant_of(worker_id, report.slot):
            return self.hold_times.remaining_s(grant.kind, self.held_s(grant.lease_id))
        return 0.0  # free, or soon clean

    def _put_worker(self, worker: Worker) -> None:
        self.workers[worker.worker_id] = worker
        self._worker_since.setdefault(worker.worker_id, self.clock())
        self._look_at(worker.worker_id)

    def _remove_worker(self, worker: Worker) -> None:
        del self.workers[worker.worker_id], self._worker_since[worker.worker_id]
        self.candidates.pop(worker.worker_id, None)

    def _put_ticket(self, ticket: Ticket) -> None:
        if former := self.tickets.get(ticket.order):
            self.wishes.pop(former.wish.request_id, None)
        self.tickets[ticket.order] = ticket
        self.wishes[ticket.wish.request_id] = ticket.wish
        self._queues.setdefault(ticket.wish.pool, Queue()).put(ticket, self.clock())

    def _remove_ticket(self, ticket: Ticket, is_granted: bool) -> Sequence[Place]:
        del self.tickets[ticket.order]
        if not is_granted:
            self.wishes.pop(ticket.wish.request_id, None)
        queue = self._queues[ticket.wish.pool]
        moved = queue.remove(ticket.order)
        if not len(queue):
            del self._queues[ticket.wish.pool]
            self._forecasts.pop(ticket.wish.pool, None)
        return moved

    def _put_grant(self, grant: Grant) -> None:
        self.grants[grant.lease_id] = grant
        if grant.ticket:
            self.wishes[grant.ticket.wish.request_id] = grant.ticket.wish
        self._grant_since.setdefault(grant.lease_id, self.clock())
        self._slots.setdefault(grant.worker_id, {})[grant.slot] = grant
        self._look_at(grant.worker_id)

    def _remove_grant(self, grant: Grant, end: End) -> None:
        if end is End.RELEASED and grant.is_claimed and grant.ticket:
            self.hold_times.add(grant.kind, self.held_s(grant.lease_id))
        del self.grants[grant.lease_id], self._grant_since[grant.lease_id]
        if grant.ticket:
            self.wishes.pop(grant.ticket.wish.request_id, None)
        slots = self._slots[grant.worker_id]
        del slots[grant.slot]
        if not slots:
            del self._slots[grant.worker_id]
        self._look_at(grant.worker_id)

    def _look_at(self, worker_id: str) -> None:
        worker = self.workers.get(worker_id)
        if worker:
            self.candidates[worker_id] = Candidate.of(worker, self._slots.get(worker_id, {}))
