"""Checks the changes that subscribers of lease stores see."""

from __future__ import annotations

import asyncio

from support.clock import Clock
from support.scheduler.faulty_client import FaultyClient

from duplane.scheduler.store.base import (
    Change,
    Grant,
    GrantEnd,
    GrantGone,
    GrantPut,
    LeaseStore,
    Ticket,
    TicketGone,
    TicketPut,
    Worker,
    WorkerGone,
    WorkerPut,
)
from duplane.scheduler.store.etcd.store import EtcdStore
from duplane.scheduler.store.memory import MemoryStore

CLAIM_TIMEOUT_S = 5.0
SlotKey = tuple[str, int]


def slot_key(grant: Grant) -> SlotKey:
    return grant.claims.worker_id, grant.claims.slot


class Grants:
    """All grants of a test, and the time at which the first subscriber saw each."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seen_at: dict[int, float] = {}  # key: the fencing number
        self._highest: dict[SlotKey, int] = {}

    def add(self, grant: Grant) -> None:
        key, number = slot_key(grant), grant.claims.fencing_number
        if number not in self._seen_at:
            assert number > self._highest.get(key, 0), "a fencing number fell"
            self._highest[key] = number
            self._seen_at[number] = self._clock.now_s

    def age_s(self, grant: Grant) -> float:
        return self._clock.now_s - self._seen_at[grant.claims.fencing_number]


class View:
    """The state that results from the changes which one subscriber has received.

    Checks that each change is possible in the state before it.
    """

    def __init__(self, history: Grants) -> None:
        self.workers: dict[str, Worker] = {}
        self.tickets: dict[int, Ticket] = {}
        self.grants: dict[SlotKey, Grant] = {}
        self._history = history
        self._revision = 0

    def apply(self, change: Change) -> None:
        assert change.revision >= self._revision, "changes came out of order"
        self._revision = change.revision
        match change:
            case WorkerPut(worker=worker):
                known = self.workers.get(worker.worker_id)
                assert known is None or known.epoch == worker.epoch, "an epoch without its end"
                self.workers[worker.worker_id] = worker
            case WorkerGone(worker=worker):
                assert self.workers.pop(worker.worker_id).epoch == worker.epoch
                assert not any(worker.worker_id == name for name, _ in self.grants)
            case TicketPut(ticket=ticket):
                self.tickets[ticket.order] = ticket
            case TicketGone(ticket=ticket, is_granted=is_granted):
                assert self.tickets.pop(ticket.order) == ticket, "a ticket ended twice"
                # Another request may wait at the order of a ticket that has got a grant.
                granted = [one.ticket for one in self.grants.values() if one.ticket]
                same = [one for one in granted if one.order == ticket.order]
                names = [one.request.request_id for one in same]
                assert is_granted == (ticket.request.request_id in names)
            case GrantPut(grant=grant):
                self._put(grant)
            case GrantGone(grant=grant, end=end):
                self._end(grant, end)

    def _put(self, grant: Grant) -> None:
        key, number = slot_key(grant), grant.claims.fencing_number
        present = self.grants.get(key)
        if present:
            assert present.claims.fencing_number == number, "two live grants on one slot"
            assert grant.is_claimed >= present.is_claimed, "a claim was taken back"
        assert self.workers[grant.claims.worker_id].epoch == grant.claims.worker_epoch
        self._history.add(grant)
        self.grants[key] = grant

    def _end(self, grant: Grant, end: GrantEnd) -> None:
        live = self.grants.pop(slot_key(grant))
        assert live.claims.fencing_number == grant.claims.fencing_number
        if end in (GrantEnd.EXPIRED, GrantEnd.RETURNED):
            assert not live.is_claimed
        if end is GrantEnd.EXPIRED:
            assert self._history.age_s(live) >= CLAIM_TIMEOUT_S, "expired early"


class Replica:
    """The running store of one scheduler, and the state that its subscriber has received."""

    def __init__(
        self, store: LeaseStore, history: Grants, etcd: FaultyClient | None = None
    ) -> None:
        self.etcd = etcd
        self.store = store
        self.view = View(history)
        store.subscribe(self.view.apply)
        self._running = asyncio.create_task(store.run())

    def check(self) -> None:
        """Raise the error of the store or of its subscriber, if one has failed."""
        if self._running.done() and not self._running.cancelled():
            self._running.result()

    async def settle(self) -> None:
        """Wait until the view has the same content as the store."""
        if isinstance(self.store, EtcdStore):
            await self.store.catch_up()

    async def expire(self) -> None:
        if isinstance(self.store, EtcdStore):
            await self.store.expire()
        elif isinstance(self.store, MemoryStore):
            self.store.expire()

    async def lose_session(self) -> None:
        """End the leases of the scheduler, as etcd does when nobody renews them."""
        if self.etcd:
            await self.etcd.revoke_lease(self.etcd.lease)

    async def close(self) -> None:
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
