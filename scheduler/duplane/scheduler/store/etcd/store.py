"""The store of several active schedulers: every operation is one transaction of etcd."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Coroutine, Generator, Sequence
from functools import partial
from typing import Any

from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.v1 import lease_pb2, registry_pb2
from duplane.scheduler import revisions
from duplane.scheduler.etcd.client import EtcdClient
from duplane.scheduler.store.base import (
    Change,
    DrainRequest,
    Grant,
    GrantGone,
    GrantPut,
    LeaseStore,
    Offer,
    TenantTime,
    Ticket,
    TicketGone,
    TicketPut,
    Worker,
    replaces,
)
from duplane.scheduler.store.etcd import operations
from duplane.scheduler.store.etcd.commits import Commits
from duplane.scheduler.store.etcd.contact import Contact
from duplane.scheduler.store.etcd.drains import Drains
from duplane.scheduler.store.etcd.facts import Facts
from duplane.scheduler.store.etcd.keys import Keys
from duplane.scheduler.store.etcd.mirror import Mirror
from duplane.scheduler.store.etcd.postponed import Postponed
from duplane.scheduler.store.etcd.session import Session, contact_limit_s
from duplane.scheduler.store.etcd.stalls import Stalls
from duplane.scheduler.store.etcd.transactions import Answer, Done, Step
from duplane.scheduler.store.etcd.write_check import WriteCheck
from duplane.scheduler.store.unclaimed_grants import ClaimDeadlines

_log = logging.getLogger(__name__)

ARRIVAL_TIMEOUT_S = 5.0  # time limit of `register` and `enqueue` while etcd does not answer
# For this time, only the scheduler at which a ticket's caller waits tries to grant the ticket.
_PRECEDENCE_S = 0.1
# A scheduler ends the expired grants of another scheduler only after this delay, because normally
# the other scheduler ends them itself.
_EXPIRY_PRECEDENCE_S = 0.5
_EXPIRING_COUNT = 64  # maximum number of unclaimed grants that are ended at the same time
MAX_WAITING = 4096  # maximum number of operations that wait for etcd; further calls are refused


class EtcdStore(LeaseStore):
    """Facts in etcd, with a copy that a watch keeps up to date.

    A transaction fails if another scheduler has changed one of the facts from which the transaction
    was made. The operation is then applied to the new facts. An operation returns when the watch
    has delivered its changes and they are published.

    Every epoch, order and fencing number is the store's base plus a revision of etcd. The base
    rises when a worker reports a higher number, which comes from another store or from the time
    before a backup was restored. The base also rises when a scheduler notices that etcd went back
    to an older revision.

    `register` and `enqueue` wait at most 5 s, and not at all while etcd refuses writes or while
    `MAX_WAITING` operations wait. Others wait, at most one for each ticket, grant and registration.
    """

    def __init__(
        self,
        client: EtcdClient,
        prefix: str,
        boot_ms: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Use the keys with this prefix. The store closes `client` when `run` ends."""
        self._clock = clock
        self._client = client
        self.facts = Facts(Keys(prefix))  # what the watch has delivered; only to be read
        self._contact = Contact()
        self._mirror = Mirror(self._client, self.facts, clock, self._contact.confirm_watch)
        self._postponed = Postponed(self._contact)
        self._session = Session(self._client, self._mirror, self._contact, revisions.at(boot_ms))
        self._commits = Commits(self._client, self._mirror, self._session)
        self._drains = Drains(self._commits, self._begin)
        self._write_check = WriteCheck(self._client, self.facts.keys.barrier)
        self._deadlines = ClaimDeadlines(self.facts.grant_of)
        self._has_new_deadline = asyncio.Event()
        self._stalls = Stalls(clock)
        self._made: set[str] = set()  # unclaimed grants of this scheduler, by lease id
        self._left_to_others: dict[int, asyncio.Event] = {}  # by order; set when the ticket changes
        self._arriving: dict[asyncio.Task[Any], None] = {}  # a dict, because it keeps their order
        self._is_closed = False
        self._mirror.listeners.append(self._on_change)

    @property
    def has_kept_queue(self) -> bool:
        return self._mirror.has_found_sessions

    @property
    def ticket_key(self) -> bytes:
        return self.facts.ticket_key

    def may_be_former(self, order: int) -> bool:
        return not self.has_kept_queue and revisions.is_of_former_run(order, self.facts.base)

    @property
    def waiting_count(self) -> int:
        """The number of operations that wait for etcd."""
        return max(len(self._arriving), self._commits.count)  # most are in both

    def subscribe(self, listener: Callable[[Change], None]) -> None:
        for change in self.facts.snapshot():
            listener(change)
        self._mirror.listeners.append(listener)

    async def until_read(self) -> None:
        await self._mirror.reached(1)

    async def until_whole(self) -> None:
        await self._mirror.until_whole()

    def watch_contact(self, listener: Callable[[bool], None]) -> None:
        self._contact.listeners.append(listener)

    def watch_refusal(self, listener: Callable[[str], None]) -> None:
        self._write_check.listeners.append(listener)

    def share_keys(self, keys: Sequence[registry_pb2.VerificationKey]) -> None:
        self._session.share_keys(keys)

    def watch_keys(
        self, listener: Callable[[Sequence[registry_pb2.VerificationKey]], None]
    ) -> None:
        self._mirror.key_listeners.append(listener)
        listener(self.facts.verification_keys)

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._mirror.run())
                tasks.create_task(self._session.run())
                tasks.create_task(self._write_check.run())
                tasks.create_task(self._expire())
                tasks.create_task(self._contact.run(contact_limit_s(), self._until_current))
        finally:
            self._is_closed = True
            self._postponed.close()
            self._commits.close()
            for arrival in list(self._arriving):
                arrival.cancel()
            await self._client.close()

    async def leave(self) -> None:
        if not self._is_closed:
            await self._session.end()

    async def register(self, register: registry_pb2.Register) -> Worker | None:
        is_abandoned = False

        def step_of(facts: Facts) -> Step[Worker | None]:
            known = facts.workers.get(register.worker_id)
            if is_abandoned and not (known and _is_of_stream(known, register)):
                raise FabricError(Reason.UNAVAILABLE, "the worker has gone")
            return operations.register(facts, register, self._session.lease)

        async def operate() -> Worker | None:
            await self._end_grants_of(
                register.worker_id,
                lambda known: not is_abandoned and replaces(register, known.register),
            )
            return await self._commits.commit(step_of, is_arrival=True)

        async def undo(worker: Worker | None) -> None:
            if worker:
                await self.unregister(worker.worker_id, worker.epoch)

        try:
            return await self._arrive(operate(), undo)
        finally:
            is_abandoned = True  # no effect if the operation is complete

    async def report(self, worker: Worker) -> bool:
        return await self._commit(lambda facts: operations.report(facts, worker))

    async def drain(self, worker_id: str, request: DrainRequest = DrainRequest.DRAIN) -> bool:
        return await self._contact.wait(self._drains.begin(worker_id, request))

    async def set_unreachable(self, worker_id: str, epoch: int, *, is_unreachable: bool) -> bool:
        return await self._commit(
            lambda facts: operations.set_unreachable(facts, worker_id, epoch, is_unreachable),
            ("set_unreachable", worker_id, epoch, is_unreachable),
        )

    async def unregister(self, worker_id: str, epoch: int) -> bool:
        async def operate() -> bool:
            await self._end_grants_of(worker_id, lambda known: known.epoch == epoch)
            return await self._commits.commit(
                lambda facts: operations.unregister(facts, worker_id, epoch)
            )

        name = ("unregister", worker_id, epoch)
        self._postponed.require_contact(name, lambda: self._begin(operate()))
        # The operation completes even if the caller is cancelled.
        return await self._contact.wait(self._begin(operate()))

    async def enqueue(
        self,
        request: lease_pb2.AcquireLeaseRequest,
        owner: str,
        order: int | None = None,
        offer: Offer | None = None,
        holder: bytes = b"",
    ) -> Ticket | Grant:
        is_abandoned = False

        def step_of(facts: Facts) -> Step[Ticket | Grant]:
            known = facts.requests.get(request.request_id)
            if is_abandoned and not (known and known.ticket.owner == owner):
                # If this call continued, it would take the ticket from a later call of its caller.
                raise FabricError(Reason.UNAVAILABLE, "the caller has gone")
            lease = self._session.lease
            return operations.enqueue(facts, request, owner, order, lease, offer, holder)

        async def operate() -> Ticket | Grant:
            if order is not None and order >= self.facts.number:
                await self.catch_up()
            with self._making(offer):
                return await self._commits.commit(step_of, is_arrival=True)

        async def undo(found: Ticket | Grant) -> None:
            if isinstance(found, Ticket):
                await self.cancel(found.order, owner)
            elif found.ticket and found.ticket.owner == owner:
                await self.give_back(found)

        try:
            return await self._arrive(operate(), undo)
        finally:
            is_abandoned = True  # no effect if the operation is complete

    async def cancel(self, order: int, owner: str | None = None) -> bool:
        name = ("cancel", order, owner)
        begin = partial(
            self._commits.begin, lambda facts: operations.cancel(facts, order, owner), name
        )
        self._postponed.require_contact(name, begin)
        return await self._contact.wait(begin())

    async def try_grant(self, ticket: Ticket, offer: Offer) -> Grant | None:
        await self._let_others_grant(ticket)
        is_abandoned = False

        def step_of(facts: Facts) -> Step[Grant | None]:
            return Done(None) if is_abandoned else operations.try_grant(facts, ticket, offer)

        try:
            with self._making(offer):
                return await self._commit(step_of)
        finally:
            is_abandoned = True  # no effect if the operation is complete

    async def claim(self, grant: Grant) -> bool:
        return await self._commit(lambda facts: operations.claim(facts, grant))

    async def give_back(self, grant: Grant, *, is_end: bool = False) -> bool:
        return await self._commit(
            lambda facts: operations.give_back(facts, grant, is_end=is_end),
            ("give_back", grant.claims.lease_id, is_end),
        )

    async def release(self, grant: Grant) -> bool:
        return await self._commit(lambda facts: operations.release(facts, grant))

    async def adopt(self, grant: Grant) -> bool:
        return await self._commit(lambda facts: operations.adopt(facts, grant))

    async def save_time(self, time: TenantTime) -> bool:
        return await self._commit(lambda facts: operations.save_time(facts, time))

    async def _commit(
        self, step_of: Callable[[Facts], Step[Answer]], shared_as: object = None
    ) -> Answer:
        """Complete an operation. Raises FabricError UNAVAILABLE while the contact is lost.

        In that case, an operation with a name (`shared_as`) is completed later. The names bound the
        number of such operations.
        """
        if shared_as is None:
            self._contact.require()
        with self._stalls.noticed():
            return await self._contact.wait(self._commits.begin(step_of, shared_as))

    async def _arrive(
        self,
        operating: Coroutine[Any, Any, Answer],
        undo: Callable[[Answer], Coroutine[Any, Any, None]],
    ) -> Answer:
        """Run an operation with a time limit. If it completes too late, undo it."""
        try:
            self._require_room()
        except FabricError:
            operating.close()
            raise
        operation = self._begin(operating)

        def on_done(done: asyncio.Task[Answer]) -> None:
            if not done.cancelled() and done.exception() is None:
                self._begin(undo(done.result()))

        try:
            async with asyncio.timeout(ARRIVAL_TIMEOUT_S):
                return await self._contact.wait(operation)
        except TimeoutError:
            operation.add_done_callback(on_done)
            raise FabricError(Reason.UNAVAILABLE, "the store does not answer") from None
        except (asyncio.CancelledError, FabricError):
            operation.add_done_callback(on_done)
            raise

    def _require_room(self) -> None:
        self._contact.require()
        self._write_check.require()
        if self.waiting_count >= MAX_WAITING:
            raise FabricError(Reason.UNAVAILABLE, "too many operations wait for the store")

    def _begin(self, operating: Coroutine[Any, Any, Answer]) -> asyncio.Task[Answer]:
        if self._is_closed:
            operating.close()
            raise FabricError(Reason.UNAVAILABLE, "the store is closed")
        arrival = asyncio.create_task(operating)
        self._arriving[arrival] = None
        arrival.add_done_callback(self._arriving.pop)
        return arrival

    async def catch_up(self) -> None:
        """Wait until the facts contain everything that etcd has confirmed by now."""
        await self._commits.catch_up()

    async def _until_current(self) -> None:
        """Wait until the facts are up to date with etcd and contain this scheduler's session."""
        await self.catch_up()
        await self._mirror.until(lambda: self._session.is_known)

    async def _end_grants_of(self, worker_id: str, may_end: Callable[[Worker], bool]) -> None:
        """End grants of a worker until one transaction can end the remaining ones."""
        while await self._commits.commit(
            lambda facts: operations.end_some_grants(facts, worker_id, may_end)
        ):
            pass

    @contextlib.contextmanager
    def _making(self, offer: Offer | None) -> Generator[None]:
        """Record that this scheduler makes a grant. The record lasts until the grant has ended."""
        if offer is None:
            yield
            return
        claims = offer.claims
        self._made.add(claims.lease_id)
        try:
            yield
        finally:
            grant = self.facts.grant_of((claims.worker_id, claims.slot))
            if grant is None or grant.claims.lease_id != claims.lease_id:
                self._made.discard(claims.lease_id)

    async def _let_others_grant(self, ticket: Ticket) -> None:
        """Wait a moment if the ticket's caller waits at another scheduler, which should grant it.

        Otherwise all schedulers would try to make every grant, and all but one would fail.
        """
        request = self.facts.requests.get(ticket.request.request_id)
        if request and request.lease != self._session.lease:
            has_changed = self._left_to_others.setdefault(ticket.order, asyncio.Event())
            try:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_PRECEDENCE_S):
                        await has_changed.wait()
            finally:
                self._left_to_others.pop(ticket.order, None)

    async def expire(self) -> float | None:
        """End the grants that were not claimed in time; return the seconds to the next deadline.

        The time in which the store does not answer does not count, because claims wait for it too.
        """
        next_in_s = self._deadlines.next_in_s(self._clock())
        if next_in_s is None or next_in_s > 0:
            return next_in_s
        with self._stalls.noticed():
            await self.catch_up()
        self._stalls.look()
        expired = filter(self._is_overdue, self._deadlines.pop_expired(self._clock()))
        while portion := list(itertools.islice(expired, _EXPIRING_COUNT)):
            steps = [partial(operations.expire, grant=grant) for grant in portion]
            await asyncio.gather(*map(self._commits.commit, steps))
        return self._deadlines.next_in_s(self._clock())

    def _is_overdue(self, grant: Grant) -> bool:
        """Give a grant a later deadline if the store has not answered all the time."""
        deadline = self._stalls.answers_since + self._claim_wait_s(grant)
        if is_early := self._clock() < deadline:
            self._deadlines.add(grant, deadline)
        return not is_early

    def _claim_wait_s(self, grant: Grant) -> float:
        slot = self.facts.slots[grant.claims.worker_id, grant.claims.slot]
        is_mine = grant.claims.lease_id in self._made
        return slot.claim_timeout_s + (0 if is_mine else _EXPIRY_PRECEDENCE_S)

    async def _expire(self) -> None:
        while True:
            self._has_new_deadline.clear()
            delay_s = await self.expire()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self._has_new_deadline.wait()

    def _on_change(self, change: Change) -> None:
        match change:
            case GrantPut(grant=grant) if not grant.is_claimed:
                self._deadlines.add(grant, self._clock() + self._claim_wait_s(grant))
                self._has_new_deadline.set()
            case GrantGone(grant=grant):
                self._made.discard(grant.claims.lease_id)
            case TicketPut(ticket=ticket) | TicketGone(ticket=ticket):
                if has_changed := self._left_to_others.get(ticket.order):
                    has_changed.set()
            case _:
                pass


def _is_of_stream(known: Worker, register: registry_pb2.Register) -> bool:
    """True if the message `register` made the registration `known`."""
    one, other = known.register, register
    return (one.incarnation, one.stream_number) == (other.incarnation, other.stream_number)
