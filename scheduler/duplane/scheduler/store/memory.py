"""The store in the memory of one scheduler. After a restart the store is empty."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from duplane.fabric.v1 import lease_pb2, registry_pb2
from duplane.scheduler import revisions
from duplane.scheduler.store.base import (
    Change,
    DrainRequest,
    Grant,
    GrantEnd,
    GrantGone,
    GrantPut,
    LeaseStore,
    Offer,
    TenantTime,
    Ticket,
    TicketGone,
    TicketPut,
    Worker,
    WorkerGone,
    WorkerPut,
    replaces,
)
from duplane.scheduler.store.unclaimed_grants import ClaimDeadlines, SlotKey


class MemoryStore(LeaseStore):
    """A store in memory. Every operation completes without waiting, which makes it atomic.

    The revision starts at a value that grows with `boot_ms`, the wall-clock time of the start. So
    it is greater than the numbers that workers and waiting callers have from an earlier process.
    """

    def __init__(self, boot_ms: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._first = self._revision = revisions.at(boot_ms)
        self._clock = clock
        self._ticket_key = secrets.token_bytes()
        self._listeners: list[Callable[[Change], None]] = []
        self._key_listeners: list[Callable[[Sequence[registry_pb2.VerificationKey]], None]] = []
        self._keys: Sequence[registry_pb2.VerificationKey] = ()
        self._workers: dict[str, Worker] = {}
        self._tickets: dict[int, Ticket] = {}
        self._grants: dict[str, dict[int, Grant]] = {}  # by worker id and slot
        self._waiting: dict[str, Ticket] = {}  # by request id
        self._waiting_counts: Counter[str] = Counter()  # by pool
        self._granted: dict[str, Grant] = {}  # by request id
        self._deadlines = ClaimDeadlines(self._grant_of)
        self._has_new_deadline = asyncio.Event()

    @property
    def has_kept_queue(self) -> bool:
        return False

    @property
    def ticket_key(self) -> bytes:
        return self._ticket_key

    def may_be_former(self, order: int) -> bool:
        return revisions.is_of_former_run(order, self._first)

    def subscribe(self, listener: Callable[[Change], None]) -> None:
        for worker in self._workers.values():
            listener(WorkerPut(self._revision, worker))
        for ticket in self._tickets.values():
            listener(TicketPut(self._revision, ticket))
        grants = [grant for slots in self._grants.values() for grant in slots.values()]
        for grant in sorted(grants, key=lambda grant: grant.claims.fencing_number):
            listener(GrantPut(self._revision, grant))
        self._listeners.append(listener)

    async def until_read(self) -> None:
        """Return immediately, because this store begins without facts."""

    async def until_whole(self) -> None:
        """Return immediately, because this store publishes each change as a whole."""

    def watch_contact(self, listener: Callable[[bool], None]) -> None:
        """Do nothing, because this store cannot be lost."""

    def watch_refusal(self, listener: Callable[[str], None]) -> None:
        """Do nothing, because this store refuses no changes."""

    def share_keys(self, keys: Sequence[registry_pb2.VerificationKey]) -> None:
        self._keys = tuple(keys)
        for listener in self._key_listeners:
            listener(self._keys)

    def watch_keys(
        self, listener: Callable[[Sequence[registry_pb2.VerificationKey]], None]
    ) -> None:
        self._key_listeners.append(listener)
        listener(self._keys)

    async def run(self) -> None:
        while True:
            self._has_new_deadline.clear()
            delay_s = self.expire()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self._has_new_deadline.wait()

    def expire(self) -> float | None:
        """End the grants that were not claimed in time; return the seconds to the next deadline."""
        now = self._clock()
        for grant in self._deadlines.pop_expired(now):
            self._drop_grant(grant, GrantEnd.EXPIRED)
        return self._deadlines.next_in_s(now)

    async def leave(self) -> None:
        """Do nothing, because registrations and tickets end with this process."""

    async def register(self, register: registry_pb2.Register) -> Worker | None:
        known = self._workers.get(register.worker_id)
        if known and not replaces(register, known.register):
            return None
        if known:
            self._drop_worker(known)
        self._rise_above(register.slots)
        worker = Worker.of(self._next(), register)
        self._put_worker(worker)
        return worker

    async def report(self, worker: Worker) -> bool:
        known = self._current(worker.worker_id, worker.epoch)
        if known is None:
            return False
        self._rise_above(worker.slots)
        self._next()
        self._put_worker(
            replace(
                worker,
                drain_request=known.drain_request,
                is_unreachable=known.is_unreachable,
            )
        )
        return True

    async def drain(self, worker_id: str, request: DrainRequest = DrainRequest.DRAIN) -> bool:
        worker = self._workers.get(worker_id)
        if worker is None:
            return False
        if worker.drain_request not in (request, DrainRequest.STOP):
            self._next()
            self._put_worker(replace(worker, drain_request=request))
        return True

    async def set_unreachable(self, worker_id: str, epoch: int, *, is_unreachable: bool) -> bool:
        worker = self._current(worker_id, epoch)
        if worker and worker.is_unreachable != is_unreachable:
            self._next()
            self._put_worker(replace(worker, is_unreachable=is_unreachable))
        return worker is not None

    async def unregister(self, worker_id: str, epoch: int) -> bool:
        worker = self._current(worker_id, epoch)
        if worker:
            self._drop_worker(worker)
        return worker is not None

    async def enqueue(
        self,
        request: lease_pb2.AcquireLeaseRequest,
        owner: str,
        order: int | None = None,
        offer: Offer | None = None,
        holder: bytes = b"",
    ) -> Ticket | Grant:
        if grant := self._granted.get(request.request_id):
            return grant
        known = self._waiting.get(request.request_id)
        if known is None and order is not None:
            known = self._tickets.get(order)
        is_new = known is None and order is None
        if offer and is_new and self._is_free(offer) and not self._waiting_counts[request.pool]:
            revision = self._next()
            return self._make_grant(Ticket(revision, owner, request, holder), offer, revision)
        revision = self._next()
        if known:
            self._forget(known)
            taken = known.order
        else:
            taken = order if order and order < revision else revision
        ticket = Ticket(taken, owner, request, holder)
        self._waiting_counts[request.pool] += 1
        self._tickets[ticket.order] = self._waiting[request.request_id] = ticket
        self._publish(TicketPut(revision, ticket))
        return ticket

    async def cancel(self, order: int, owner: str | None = None) -> bool:
        ticket = self._tickets.get(order)
        if ticket is None or owner not in (None, ticket.owner):
            return False
        self._drop_ticket(ticket, is_granted=False)
        return True

    async def try_grant(self, ticket: Ticket, offer: Offer) -> Grant | None:
        waiting = self._tickets.get(ticket.order)
        if waiting is None or waiting.owner != ticket.owner or not self._is_free(offer):
            return None
        grant = self._make_grant(waiting, offer, self._next())
        self._drop_ticket(waiting, is_granted=True)
        return grant

    async def claim(self, grant: Grant) -> bool:
        live = self._live(grant)
        if live and not live.is_claimed:
            self._next()
            self._put_grant(replace(live, is_claimed=True))
        return live is not None

    async def give_back(self, grant: Grant, *, is_end: bool = False) -> bool:
        live = self._live(grant)
        if live and not live.is_claimed:
            self._drop_grant(live, GrantEnd.RETURNED)
        elif live and (not live.is_revoked or is_end > live.is_ended):
            self._next()
            self._put_grant(replace(live, is_revoked=True, is_ended=is_end or live.is_ended))
        return live is not None

    async def release(self, grant: Grant) -> bool:
        live = self._live(grant)
        if live:
            self._drop_grant(live, GrantEnd.RELEASED)
        return live is not None

    async def adopt(self, grant: Grant) -> bool:
        claims = grant.claims
        if self._current(claims.worker_id, claims.worker_epoch) is None:
            return False
        if self._grant_of((claims.worker_id, claims.slot)):
            return False
        self._next()
        self._put_grant(grant)
        return True

    async def save_time(self, time: TenantTime) -> bool:
        """Save nothing, because this store ends with its scheduler, which counts the time."""
        del time
        return False

    def _is_free(self, offer: Offer) -> bool:
        claims = offer.claims
        is_attached = self._current(claims.worker_id, claims.worker_epoch) is not None
        return is_attached and self._grant_of((claims.worker_id, claims.slot)) is None

    def _make_grant(self, ticket: Ticket, offer: Offer, number: int) -> Grant:
        claims = lease_pb2.LeaseClaims()
        claims.CopyFrom(offer.claims)
        claims.fencing_number = number
        grant = Grant(claims, ticket)
        self._deadlines.add(grant, self._clock() + offer.claim_timeout_s)
        self._has_new_deadline.set()
        self._put_grant(grant)
        return grant

    def _next(self) -> int:
        self._revision += 1
        return self._revision

    def _rise_above(self, slots: Iterable[registry_pb2.SlotReport]) -> None:
        self._revision = max([self._revision, *(slot.fencing_number for slot in slots)])

    def _publish(self, change: Change) -> None:
        for listener in self._listeners:
            listener(change)

    def _current(self, worker_id: str, epoch: int) -> Worker | None:
        worker = self._workers.get(worker_id)
        return worker if worker and worker.epoch == epoch else None

    def _grant_of(self, key: SlotKey) -> Grant | None:
        worker_id, slot = key
        return self._grants.get(worker_id, {}).get(slot)

    def _live(self, grant: Grant) -> Grant | None:
        """Return the present form of a grant, or None if the grant has ended."""
        claims = grant.claims
        live = self._grant_of((claims.worker_id, claims.slot))
        return live if live and live.claims.fencing_number == claims.fencing_number else None

    def _put_worker(self, worker: Worker) -> None:
        self._workers[worker.worker_id] = worker
        self._publish(WorkerPut(self._revision, worker))

    def _drop_worker(self, worker: Worker) -> None:
        for grant in list(self._grants.get(worker.worker_id, {}).values()):
            self._drop_grant(grant, GrantEnd.WORKER_GONE)
        del self._workers[worker.worker_id]
        self._publish(WorkerGone(self._next(), worker))

    def _drop_ticket(self, ticket: Ticket, *, is_granted: bool) -> None:
        self._forget(ticket)
        revision = self._revision if is_granted else self._next()
        self._publish(TicketGone(revision, ticket, is_granted))

    def _forget(self, ticket: Ticket) -> None:
        pool = ticket.request.pool
        del self._tickets[ticket.order], self._waiting[ticket.request.request_id]
        self._waiting_counts[pool] -= 1
        if not self._waiting_counts[pool]:
            del self._waiting_counts[pool]

    def _put_grant(self, grant: Grant) -> None:
        self._grants.setdefault(grant.claims.worker_id, {})[grant.claims.slot] = grant
        if grant.ticket:
            self._granted[grant.ticket.request.request_id] = grant
        self._publish(GrantPut(self._revision, grant))

    def _drop_grant(self, grant: Grant, end: GrantEnd) -> None:
        slots = self._grants[grant.claims.worker_id]
        del slots[grant.claims.slot]
        if not slots:
            del self._grants[grant.claims.worker_id]
        if grant.ticket:
            self._granted.pop(grant.ticket.request.request_id, None)
        self._publish(GrantGone(self._next(), grant, end))
