"""The loop that grants free slots. Policy chooses ticket and slot; the store accepts or refuses."""

from __future__ import annotations

import asyncio
import logging
import uuid
from datetime import UTC, datetime, timedelta

from duplane.fabric.durations import to_duration
from duplane.fabric.v1 import lease_pb2
from duplane.scheduler.policy.placement import Candidate
from duplane.scheduler.state import SchedulerState
from duplane.scheduler.store.base import Change, LeaseStore, Ticket, Worker, WorkerPut

_log = logging.getLogger(__name__)


class GrantLoop:
    """Grants from one store. Several schedulers may run such a loop on the same store."""

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
        self._resume_until = state.clock() + resume_grace_s
        self._is_resuming = False
        self._epochs: dict[str, int] = {}  # by worker id, of workers seen before that time
        self._has_change = asyncio.Event()
        self._is_idle = asyncio.Event()
        state.listeners.append(self._on_change)

    def _expect_returning(self, worker: Worker) -> None:
        """Hold grants back, so that the callers of an earlier scheduler have time to return.

        Grants are held back only if a worker registers that has served sessions before. In a new
        fabric no worker has, so grants begin at once.
        """
        is_known = self._epochs.get(worker.worker_id) == worker.epoch
        self._epochs[worker.worker_id] = worker.epoch
        if is_known or not any(slot.fencing_number for slot in worker.register.slots):
            return
        if self._hold_s() is None and self._state.clock() < self._resume_until:
            _log.info("workers have served before; waiting for their queue to come back")
        self._is_resuming = True

    async def idle(self) -> None:
        """Wait until everything that can be granted now is granted.

        Returns at once while grants are held back.
        """
        await self._is_idle.wait()

    async def run(self) -> None:
        """Grant everything that can be granted, after every change, until cancelled."""
        while True:
            self._has_change.clear()
            hold_s = self._hold_s()
            if hold_s is None:
                await self._grant_all()
            if not self._has_change.is_set():
                self._is_idle.set()
            if hold_s is not None:
                await asyncio.sleep(hold_s)
            else:
                await self._has_change.wait()

    def _on_change(self, change: Change) -> None:
        if isinstance(change, WorkerPut) and self._state.clock() < self._resume_until:
            self._expect_returning(change.worker)
        if self._hold_s() is None:
            self._is_idle.clear()
        self._has_change.set()

    def _hold_s(self) -> float | None:
        left_s = self._resume_until - self._state.clock()
        return left_s if self._is_resuming and left_s > 0 else None

    async def _grant_all(self) -> None:
        for pool in self._state.waiting_pools:
            while proposal := self._state.next_grant(pool):
                ticket, candidate = proposal
                claims = self.claims(ticket, candidate)
                grant = await self._store.try_grant(ticket, claims, self._claim_timeout_s)
                if grant is None or self._state.entry(ticket):
                    return  # the state is older than the store; the next change wakes this loop
                await asyncio.sleep(0)  # let other tasks run between two grants

    def claims(self, ticket: Ticket, candidate: Candidate) -> lease_pb2.LeaseClaims:
        """Return the claims of a new lease. The store adds the fencing number."""
        claims = lease_pb2.LeaseClaims(
            lease_id=uuid.uuid4().hex,
            worker_id=candidate.worker.worker_id,
            worker_epoch=candidate.worker.epoch,
            slot=candidate.free_slots[0],
            kind=ticket.request.kind,
            session_id=ticket.request.session_id,
            claim_timeout=to_duration(self._claim_timeout_s),
        )
        expiry = datetime.now(UTC) + timedelta(seconds=self._claim_timeout_s)
        claims.expire_time.FromDatetime(expiry)
        return claims
