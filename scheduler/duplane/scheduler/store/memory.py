"""The embedded store: one process, nothing kept over a restart but the rise of the revision."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from duplane.fabric.v1 import registry_pb2
from duplane.scheduler.store.base import (
    Change,
    End,
    Grant,
    GrantGone,
    GrantPut,
    LeaseStore,
    Ticket,
    TicketGone,
    TicketPut,
    Wish,
    Worker,
    WorkerGone,
    WorkerPut,
)

_REVISIONS_PER_MS = 20  # bits: no process makes a million changes in a millisecond
Place = tuple[str, int]  # worker id, slot


class MemoryStore(LeaseStore):
    """Every verb runs to its end without waiting, which is what makes it atomic.

    The revision starts at `boot_ms` (wall time) so that it lies above every earlier process's,
    whose numbers the workers and the waiting callers still hold.
    """

    def __init__(self, boot_ms: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._revision = boot_ms << _REVISIONS_PER_MS
        self._clock = clock
        self._listeners: list[Callable[[Change], None]] = []
        self._workers: dict[str, Worker] = {}
        self._tickets: dict[int, Ticket] = {}
        self._grants: dict[Place, Grant] = {}
        self._waiting: dict[str, Ticket] = {}  # by request id
        self._granted: dict[str, Grant] = {}  # by request id
        self._deadlines: list[tuple[float, int, Place]] = []  # of unclaimed grants, by token
        self._has_new_deadline = asyncio.Event()

    def subscribe(self, listener: Callable[[Change], None]) -> None:
        for worker in self._workers.values():
            listener(WorkerPut(self._revision, worker))
        for ticket in self._tickets.values():
            listener(TicketPut(self._revision, ticket))
        for grant in self._grants.values():
            listener(GrantPut(self._revision, grant))
        self._listeners.append(listener)

    async def run(self) -> None:
        while True:
            self._has_new_deadline.clear()
            delay = self.expire()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._has_new_deadline.wait()

    def expire(self) -> float | None:
        """End unclaimed grants that are due; return the seconds to the next one, if any."""
        now = self._clock()
        while self._deadlines:
            deadline, token, place = self._deadlines[0]
            grant = self._grants.get(place)
            is_unclaimed = grant is not None and grant.token == token and not grant.is_claimed
            if is_unclaimed and deadline > now:
                return deadline - now
            heapq.heappop(self._deadlines)
            if is_unclaimed and grant:
                self._drop_grant(grant, End.EXPIRED)
        return None

    async def register(self, register: registry_pb2.Register) -> Worker | None:
        known = self._workers.get(register.worker_id)
        if known and known.register.incarnation != register.incarnation:
            return None
        if known:
            self._drop_worker(known)
        self._rise_above(register.slots)
        worker = Worker(self._next(), register, register.is_draining)
        self._put_worker(worker)
        return worker

    async def report(self, worker: Worker) -> bool:
        known = self._current(worker.worker_id, worker.epoch)
        if known is None:
            return False
        self._rise_above(worker.register.slots)
        self._next()
        self._put_worker(replace(worker, is_drain_wanted=known.is_drain_wanted))
        return True

    async def drain(self, worker_id: str) -> bool:
        worker = self._workers.get(worker_id)
        if worker is None:
            return False
        self._next()
        self._put_worker(replace(worker, is_drain_wanted=True))
        return True

    async def unregister(self, worker_id: str, epoch: int) -> bool:
        worker = self._current(worker_id, epoch)
        if worker:
            self._drop_worker(worker)
        return worker is not None

    async def enqueue(self, wish: Wish, order: int | None = None) -> Ticket | Grant:
        if granted := self._granted.get(wish.request_id):
            return granted
        known = self._waiting.get(wish.request_id)
        if known is None and order is not None:
            known = self._tickets.get(order)
        revision = self._next()
        if known:
            del self._waiting[known.wish.request_id]
            ticket = Ticket(known.order, wish)
        else:
            ticket = Ticket(order if order and order < revision else revision, wish)
        self._tickets[ticket.order] = self._waiting[wish.request_id] = ticket
        self._tell(TicketPut(revision, ticket))
        return ticket

    async def cancel(self, order: int, owner: str | None = None) -> bool:
        ticket = self._tickets.get(order)
        if ticket is None or owner not in (None, ticket.wish.owner):
            return False
        self._drop_ticket(ticket, is_granted=False)
        return True

    async def try_grant(self, proposal: Grant, claim_timeout_s: float) -> Grant | None:
        ticket, place = proposal.ticket, (proposal.worker_id, proposal.slot)
        if ticket is None or self._tickets.get(ticket.order) != ticket:
            return None
        if self._current(proposal.worker_id, proposal.worker_epoch) is None:
            return None
        if place in self._grants:
            return None
        grant = replace(proposal, token=self._next())
        heapq.heappush(self._deadlines, (self._clock() + claim_timeout_s, grant.token, place))
        self._has_new_deadline.set()
        self._put_grant(grant)
        self._drop_ticket(ticket, is_granted=True)
        return grant

    async def claim(self, grant: Grant) -> bool:
        known = self._standing(grant)
        if known and not known.is_claimed:
            self._next()
            self._put_grant(replace(known, is_claimed=True))
        return known is not None

    async def give_back(self, grant: Grant) -> bool:
        known = self._standing(grant)
        if known and not known.is_claimed:
            self._drop_grant(known, End.RETURNED)
        elif known and not known.is_revoked:
            self._next()
            self._put_grant(replace(known, is_revoked=True))
        return known is not None

    async def release(self, grant: Grant) -> bool:
        known = self._standing(grant)
        if known:
            self._drop_grant(known, End.RELEASED)
        return known is not None

    async def adopt(self, grant: Grant) -> bool:
        if self._current(grant.worker_id, grant.worker_epoch) is None:
            return False
        if (grant.worker_id, grant.slot) in self._grants:
            return False
        self._next()
        self._put_grant(grant)
        return True

    def _next(self) -> int:
        self._revision += 1
        return self._revision

    def _rise_above(self, slots: Iterable[registry_pb2.SlotReport]) -> None:
        self._revision = max([self._revision, *(slot.fencing_number for slot in slots)])

    def _tell(self, change: Change) -> None:
        for listener in self._listeners:
            listener(change)

    def _current(self, worker_id: str, epoch: int) -> Worker | None:
        worker = self._workers.get(worker_id)
        return worker if worker and worker.epoch == epoch else None

    def _standing(self, grant: Grant) -> Grant | None:
        known = self._grants.get((grant.worker_id, grant.slot))
        return known if known and known.token == grant.token else None

    def _put_worker(self, worker: Worker) -> None:
        self._workers[worker.worker_id] = worker
        self._tell(WorkerPut(self._revision, worker))

    def _drop_worker(self, worker: Worker) -> None:
        held = [grant for grant in self._grants.values() if grant.worker_id == worker.worker_id]
        for grant in held:
            self._drop_grant(grant, End.WORKER_GONE)
        del self._workers[worker.worker_id]
        self._tell(WorkerGone(self._next(), worker))

    def _drop_ticket(self, ticket: Ticket, *, is_granted: bool) -> None:
        del self._tickets[ticket.order]
        del self._waiting[ticket.wish.request_id]
        revision = self._revision if is_granted else self._next()
        self._tell(TicketGone(revision, ticket, is_granted))

    def _put_grant(self, grant: Grant) -> None:
        self._grants[grant.worker_id, grant.slot] = grant
        if grant.ticket:
            self._granted[grant.ticket.wish.request_id] = grant
        self._tell(GrantPut(self._revision, grant))

    def _drop_grant(self, grant: Grant, end: End) -> None:
        del self._grants[grant.worker_id, grant.slot]
        if grant.ticket:
            self._granted.pop(grant.ticket.wish.request_id, None)
        self._tell(GrantGone(self._next(), grant, end))
