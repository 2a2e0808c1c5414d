"""The loop that grants free slots. `policy/` chooses ticket and slot; the store makes the grant."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from datetime import UTC, datetime, timedelta

from duplane.fabric.durations import to_duration
from duplane.fabric.errors import FabricError
from duplane.fabric.v1 import lease_pb2
from duplane.scheduler.policy.placement import Candidate
from duplane.scheduler.state import SchedulerState
from duplane.scheduler.store.base import (
    RETURN_S,
    Change,
    Grant,
    LeaseStore,
    Offer,
    Ticket,
    Worker,
    WorkerPut,
)

_log = logging.getLogger(__name__)

MAX_RUNNING = 256  # maximum number of grants that wait for the store at the same time
PORTION = 8  # grants that are begun before other tasks can run
# After a restart that has lost the queue, and after a loss of the contact to the store, callers
# return with their tickets. The loop waits for them: it grants nothing for RETURN_S. Then it waits
# until no caller has returned for LATE_RETURN_S.
LATE_RETURN_S = 0.3
# For this time after a restart, callers return to places that they cannot prove. Callers need less
# than a second to connect, but a host may be busy with its start.
ACCEPT_RETURNS_S = 5.0


class GrantLoop:
    """Grants the free slots of one store. Several schedulers may run this loop on the same store.

    Several grants can be under way at the same time. The slot and the ticket of each grant are
    reserved until the store has answered, so that the loop does not choose them again.
    """

    def __init__(
        self,
        store: LeaseStore,
        state: SchedulerState,
        claim_timeout_s: float,
        resume_grace_s: float,
    ) -> None:
        self._store = store
        self._state = state
        self._claim_timeout_s = claim_timeout_s
        self._resume_grace_s = resume_grace_s
        self._await_returns()
        self._accept_returns_until = state.clock() + ACCEPT_RETURNS_S
        self._is_resuming = False
        self._has_lost_queue = False
        # By worker id; of workers seen until `_accept_returns_until`.
        self._epochs: dict[str, int] = {}
        self._running: dict[int, asyncio.Task[None]] = {}  # grants, by order of the ticket
        self._has_change = asyncio.Event()
        self._is_idle = asyncio.Event()
        state.listeners.append(self._on_change)
        store.watch_contact(self._on_contact)

    def _await_returns(self) -> None:
        """Set the time until which grants wait, if callers are expected to return."""
        now = self._state.clock()
        self._resume_limit = now + self._resume_grace_s
        self._resume_until = min(self._resume_limit, now + RETURN_S)

    def _expect_returning(self, worker: Worker) -> None:
        """Hold grants back after a restart, so that waiting callers can return to their places.

        Grants are held back only if the store has lost the queue of an earlier scheduler. There was
        an earlier scheduler if `worker` has served sessions before. In a new fabric, no worker has
        served a session, so grants begin immediately.
        """
        if self._store.has_kept_queue:
            return
        is_known = self._epochs.get(worker.worker_id) == worker.epoch
        self._epochs[worker.worker_id] = worker.epoch
        if is_known or not any(slot.fencing_number for slot in worker.slots):
            return
        self._has_lost_queue = True
        if self._state.clock() < self._resume_until:
            if self._hold_s() is None:
                _log.info("a restart has lost the queue; waiting for its callers to return")
            self._is_resuming = True

    def may_return(self, order: int) -> bool:
        """True if the caller of a ticket without a valid proof may return to its place now.

        After a restart that has lost the queue, nobody can prove where it stood. So the places of
        callers that return count for a moment: for a shorter one if the workers have served no
        session, so that there may have been no queue.
        """
        now = self._state.clock()
        is_expected = self._has_lost_queue or not self._state.workers or now < self._resume_limit
        is_early = now < self._accept_returns_until
        return is_expected and is_early and self._store.may_be_former(order)

    async def enqueue(
        self,
        request: lease_pb2.AcquireLeaseRequest,
        owner: str,
        order: int | None = None,
        holder: bytes = b"",
    ) -> Ticket | Grant:
        """Enqueue a request; grant it in the same step if a slot is free and nobody waits."""
        if order is not None:
            latest = min(self._resume_limit, self._state.clock() + LATE_RETURN_S)
            self._resume_until = max(self._resume_until, latest)
        await self._store.until_whole()
        candidate = self._state.free_candidate(request) if order is None else None
        if candidate is None or self._hold_s() is not None:
            return await self._store.enqueue(request, owner, order, holder=holder)
        offer = self.offer(request, candidate, holder)
        worker_id, slot = offer.claims.worker_id, offer.claims.slot
        self._state.reserve(worker_id, slot)
        try:
            return await self._store.enqueue(request, owner, order, offer, holder)
        finally:
            self._state.unreserve(worker_id, slot)
            self.wake()

    async def settled(self, order: int | None) -> None:
        """Wait until the ticket with this order number is granted, if a slot for it is free now.

        Returns immediately while grants are held back.
        """
        await self._is_idle.wait()
        if running := self._running.get(order or 0):
            await asyncio.wait([running])

    async def run(self) -> None:
        """Grant everything that can be granted, after every change, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._has_change.clear()
                hold_s = self._hold_s()
                begun_at = self._state.clock()
                if hold_s is None:
                    await self._begin_all(tasks)
                if not self._has_change.is_set():
                    self._is_idle.set()
                if hold_s is not None:
                    await asyncio.sleep(hold_s)
                else:
                    await self._until_change(self._state.avoidance_left_s(begun_at))

    async def _until_change(self, within_s: float | None) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._has_change.wait()

    def _on_change(self, change: Change) -> None:
        if isinstance(change, WorkerPut) and self._state.clock() < self._accept_returns_until:
            self._expect_returning(change.worker)
        self.wake()

    def _on_contact(self, is_lost: bool) -> None:
        if not is_lost:  # the loss has ended all calls
            self._await_returns()
            self._is_resuming = True
            self.wake()

    def wake(self) -> None:
        """Look for grants that have become possible without a change of the store."""
        if self._hold_s() is None:
            self._is_idle.clear()
        self._has_change.set()

    def _hold_s(self) -> float | None:
        left_s = self._resume_until - self._state.clock()
        return left_s if self._is_resuming and left_s > 0 else None

    @property
    def _may_begin(self) -> bool:
        """True if the loop may begin another grant."""
        return len(self._running) < MAX_RUNNING and self._hold_s() is None

    async def _begin_all(self, tasks: asyncio.TaskGroup) -> None:
        """Begin every possible grant, with pauses for other tasks.

        Before the first grant and after each pause, waits until every change of the store is
        published completely.
        """
        await self._store.until_whole()
        count = 0
        for pool in self._state.waiting_pools:
            while self._may_begin and (proposal := self._state.next_grant(pool)):
                self._begin(tasks, *proposal)
                count += 1
                if count % PORTION == 0:
                    await asyncio.sleep(0)
                    await self._store.until_whole()

    def _begin(self, tasks: asyncio.TaskGroup, ticket: Ticket, candidate: Candidate) -> None:
        offer = self.offer(ticket.request, candidate, ticket.holder)
        self._state.reserve(offer.claims.worker_id, offer.claims.slot, ticket.order)
        granting = self._grant(ticket, offer, self._state.return_count)
        self._running[ticket.order] = tasks.create_task(granting)

    async def _grant(self, ticket: Ticket, offer: Offer, return_count: int) -> None:
        """Grant a reserved slot to `ticket`.

        Does nothing if a ticket was put ahead of others after `ticket` was chosen.
        """
        revision = self._state.revision
        grant = None
        try:
            if return_count == self._state.return_count:
                grant = await self._store.try_grant(ticket, offer)
        except FabricError as error:  # no contact to the store; its return wakes this loop
            _log.debug("no grant: %s", error)
        finally:
            del self._running[ticket.order]
            self._state.unreserve(offer.claims.worker_id, offer.claims.slot, ticket.order)
            # If the store refuses the grant, the ticket or the slot has changed. If this scheduler
            # does not know the change yet, the arrival of the change wakes the loop.
            if grant or revision != self._state.revision:
                self.wake()

    def offer(
        self, request: lease_pb2.AcquireLeaseRequest, candidate: Candidate, holder: bytes = b""
    ) -> Offer:
        """Return a new lease for a free slot. The store adds the fencing number."""
        claims = lease_pb2.LeaseClaims(
            lease_id=uuid.uuid4().hex,
            worker_id=candidate.worker.worker_id,
            worker_epoch=candidate.worker.epoch,
            slot=candidate.free_slots[0],
            kind=request.kind,
            session_id=request.session_id,
            holder=holder,
            claim_timeout=to_duration(self._claim_timeout_s),
            tenant_id=request.tenant_id,
        )
        expiry = datetime.now(UTC) + timedelta(seconds=self._claim_timeout_s)
        claims.expire_time.FromDatetime(expiry)
        return Offer(claims, self._claim_timeout_s)
