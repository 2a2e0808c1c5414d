"""Gives free slots to those whose turn it is: asks policy, and lets the store say yes or no."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from duplane.scheduler.policy import Assignment, Place, assign
from duplane.scheduler.store.base import Change, Grant, LeaseStore, Ticket
from duplane.scheduler.view import View

_log = logging.getLogger(__name__)


class Placement:
    """One loop that grants. Several schedulers may run it over one store."""

    def __init__(
        self, store: LeaseStore, view: View, claim_timeout_s: float, resume_grace_s: float
    ) -> None:
        self._store = store
        self._view = view
        self._claim_timeout_s = claim_timeout_s
        self._resume_until = view.clock() + resume_grace_s
        self._is_resuming = False
        self._has_change = asyncio.Event()
        view.listeners.append(self._on_change)

    def expect_returning(self) -> None:
        """Let those who queued at an earlier scheduler come back before anybody is granted.

        Called when a worker turns up that has served before. A queue only builds where workers
        were granted out, so nobody is made to wait in a fabric that starts from nothing.
        """
        if self._hold_s() is None and self._view.clock() < self._resume_until:
            _log.info("workers have served before; waiting for their queue to come back")
        self._is_resuming = True

    def is_due(self, ticket: Ticket) -> bool:
        """Tell whether a slot is free for this ticket, so that its grant is on the way."""
        return any(due.ticket.order == ticket.order for due in self._due(ticket.wish.pool))

    async def run(self) -> None:
        """Grant whatever can be granted, on every change, until cancelled."""
        while True:
            self._has_change.clear()
            await self._grant_due()
            if (hold_s := self._hold_s()) is not None:
                await asyncio.sleep(hold_s)
            else:
                await self._has_change.wait()

    def _on_change(self, change: Change, moved: Sequence[Place]) -> None:
        del change, moved
        self._has_change.set()

    def _hold_s(self) -> float | None:
        left_s = self._resume_until - self._view.clock()
        return left_s if self._is_resuming and left_s > 0 else None

    def _due(self, pool: str) -> Sequence[Assignment]:
        if self._hold_s() is not None:
            return ()
        return assign(self._view.queue(pool), self._view.pool_candidates(pool))

    async def _grant_due(self) -> None:
        for pool in self._view.pools:
            for due in self._due(pool):
                grant = await self._store.try_grant(self._propose(due), self._claim_timeout_s)
                if grant is None:
                    return  # the view is behind; the change that it lacks will wake this loop

    def _propose(self, due: Assignment) -> Grant:
        wish = due.ticket.wish
        return Grant(
            token=0,
            lease_id=uuid.uuid4().hex,
            worker_id=due.worker.worker_id,
            worker_epoch=due.worker.epoch,
            slot=due.slot,
            kind=wish.kind,
            session_id=wish.session_id,
            ticket=due.ticket,
            expire_time=datetime.now(UTC) + timedelta(seconds=self._claim_timeout_s),
        )
