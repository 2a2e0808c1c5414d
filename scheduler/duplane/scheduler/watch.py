"""Shows the state to operators: as lists, and as streams of a snapshot and all later changes.

All watchers share the message of a change. A watcher with too many unread changes gets a new
snapshot instead of these changes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from typing import TypeVar, assert_never

from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.v1 import admin_pb2, registry_pb2
from duplane.scheduler.messages import (
    lease_status,
    lost_worker_status,
    ticket_status,
    worker_status,
)
from duplane.scheduler.policy.fair_queue import QueueEntry
from duplane.scheduler.state import SchedulerState
from duplane.scheduler.store.base import (
    Change,
    GrantGone,
    GrantPut,
    TicketGone,
    TicketPut,
    TimePut,
    Worker,
    WorkerGone,
    WorkerPut,
)

_Key = TypeVar("_Key", int, str)
_Status = TypeVar("_Status")
_Listed = WorkerPut | WorkerGone | TicketPut | TicketGone | GrantPut | GrantGone
SNAPSHOT_LENGTH = 1024  # workers, leases and tickets in one part of a snapshot
PORTION = 64  # workers, leases and tickets that are described before other tasks can run
MAX_WATCHER_COUNT = 64  # each can hold a backlog of its own
BACKLOG_LENGTH = 4096  # maximum number of unread changes; one grant can move every waiting ticket


class _Watcher:
    """One stream of changes."""

    def __init__(self) -> None:
        self.backlog: deque[admin_pb2.WatchResponse] = deque()
        self.is_behind = True  # the next message must be a snapshot
        self.has_more = asyncio.Event()
        self.has_more.set()

    def push(self, message: admin_pb2.WatchResponse) -> None:
        if self.is_behind:
            return
        self.backlog.append(message)
        if len(self.backlog) > BACKLOG_LENGTH:
            self.start_again()
        self.has_more.set()

    def start_again(self) -> None:
        """Let the next message be a snapshot."""
        self.backlog.clear()
        self.is_behind = True
        self.has_more.set()


class Watch:
    """Lists the state and publishes its changes."""

    def __init__(self, state: SchedulerState, ticket_limit: int) -> None:
        self._state = state
        self.ticket_limit = ticket_limit
        self._reports: dict[str, tuple[registry_pb2.Report, float]] = {}  # latest, by worker id
        self._watchers: set[_Watcher] = set()
        self._why_refused = ""
        self.store_refusal = ""  # why the store refuses changes
        state.listeners.append(self._on_change)
        state.position_listeners.append(self._on_moved)
        state.lost_workers.listeners.append(self._on_forgotten)

    def note_report(self, worker_id: str, report: registry_pb2.Report) -> None:
        """Keep a worker's last report and the time of its arrival."""
        self._reports[worker_id] = report, self._state.clock()

    def publish_worker(self, worker: Worker) -> None:
        """Publish a worker whose report changed only measured values, which no store keeps."""
        if self._watchers:
            self._publish(admin_pb2.WatchResponse(worker=self._worker_status(worker)))

    @property
    def worker_ids(self) -> Collection[str]:
        """The ids of the workers that are attached or lost."""
        return [*self._state.workers, *self._state.lost_workers.ids]

    def worker(self, worker_id: str) -> admin_pb2.WorkerStatus | None:
        """Describe a worker. Return None if the worker is neither attached nor lost."""
        worker = self._state.workers.get(worker_id)
        return self._worker_status(worker) if worker else self._lost_worker_status(worker_id)

    def lease(self, lease_id: str) -> admin_pb2.LeaseStatus | None:
        """Describe a lease. Return None if the lease has ended."""
        grant = self._state.grants.get(lease_id)
        return lease_status(grant, self._state) if grant else None

    def ticket(self, order: int) -> admin_pb2.TicketStatus | None:
        """Describe a ticket. Return None if the ticket does not wait."""
        ticket = self._state.tickets.get(order)
        entry = self._state.entry(ticket) if ticket else None
        return ticket_status(entry, self._state) if entry else None

    async def snapshot(self) -> AsyncGenerator[admin_pb2.Snapshot]:
        """Yield the whole state in parts."""
        part = self._snapshot_part()
        part.store_refusal = self.store_refusal
        count = 0
        for statuses, name in (
            (_described(sorted(self.worker_ids), self.worker), "workers"),
            (_described(list(self._state.grants), self.lease), "leases"),
            (_described(sorted(self._state.tickets), self.ticket), "tickets"),
        ):
            async for status in statuses:
                if count == SNAPSHOT_LENGTH:
                    yield part
                    part = self._snapshot_part()
                    count = 0
                getattr(part, name).append(status)
                count += 1
        part.has_more = False
        yield part

    def _snapshot_part(self) -> admin_pb2.Snapshot:
        return admin_pb2.Snapshot(ticket_limit=self.ticket_limit, has_more=True)

    async def steps(self) -> AsyncGenerator[admin_pb2.WatchResponse]:
        """Yield a snapshot, then each change.

        Raises UNAVAILABLE when calls are refused, TOO_MANY_WATCHES if too many are open.
        """
        if len(self._watchers) >= MAX_WATCHER_COUNT:
            message = f"{MAX_WATCHER_COUNT} watches are open; use the lists, or try again later"
            raise FabricError(Reason.TOO_MANY_WATCHES, message)
        watcher = _Watcher()
        self._watchers.add(watcher)
        try:
            while not self._why_refused:
                await watcher.has_more.wait()
                watcher.has_more.clear()
                if watcher.is_behind:
                    watcher.is_behind = False
                    async for part in self.snapshot():
                        yield admin_pb2.WatchResponse(snapshot=part)
                while watcher.backlog:
                    yield watcher.backlog.popleft()
        finally:
            self._watchers.discard(watcher)
        self.require_accepted()

    def refuse(self, why: str) -> None:
        """Refuse watches for the reason `why`, or accept watches again if `why` is empty.

        A refusal ends every open watch with UNAVAILABLE.
        """
        self._why_refused = why
        for watcher in self._watchers if why else ():
            watcher.has_more.set()

    def set_store_refusal(self, refusal: str) -> None:
        """Publish why the store refuses changes; an empty text means that it accepts them."""
        self.store_refusal = refusal
        for watcher in self._watchers:
            watcher.start_again()

    def require_accepted(self) -> None:
        """Raise UNAVAILABLE if calls are refused, because the state may be out of date."""
        if self._why_refused:
            raise FabricError(Reason.UNAVAILABLE, self._why_refused)

    def _worker_status(self, worker: Worker) -> admin_pb2.WorkerStatus:
        report, at = self._reports.get(worker.worker_id, (None, None))
        age_s = self._state.attached_s(worker.worker_id)
        if at is not None:
            age_s = self._state.clock() - at
        return worker_status(worker, report, age_s, self._state)

    def _lost_worker_status(self, worker_id: str) -> admin_pb2.WorkerStatus | None:
        lost = self._state.lost_workers.get(worker_id)
        if lost is None:
            return None
        now = self._state.clock()
        # Without a report, the worker's registration counts as its last report.
        report, at = self._reports.get(worker_id, (None, lost.lost_at - lost.attached_s))
        return lost_worker_status(lost, report, now - at, now)

    def _publish(self, message: admin_pb2.WatchResponse) -> None:
        for watcher in self._watchers:
            watcher.push(message)

    def _on_change(self, change: Change) -> None:
        if isinstance(change, WorkerGone):
            worker_id = change.worker.worker_id
            if not self._state.lost_workers.get(worker_id):
                self._reports.pop(worker_id, None)
        if self._watchers and not isinstance(change, TimePut):
            self._publish(self._message(change))

    def _on_forgotten(self, worker_id: str) -> None:
        """Forget the report of a worker that is no longer lost."""
        self._reports.pop(worker_id, None)
        if self._watchers:
            self._publish(admin_pb2.WatchResponse(removed_worker_id=worker_id))

    def _on_moved(self, moved: Sequence[QueueEntry]) -> None:
        if self._watchers:
            for entry in moved:
                status = ticket_status(entry, self._state)
                self._publish(admin_pb2.WatchResponse(ticket=status))

    def _message(self, change: _Listed) -> admin_pb2.WatchResponse:
        match change:
            case WorkerPut(worker=worker):
                return admin_pb2.WatchResponse(worker=self._worker_status(worker))
            case WorkerGone(worker=worker):
                lost = self._lost_worker_status(worker.worker_id)
                gone = "" if lost else worker.worker_id
                return admin_pb2.WatchResponse(worker=lost, removed_worker_id=gone or None)
            case GrantPut(grant=grant):
                return admin_pb2.WatchResponse(lease=lease_status(grant, self._state))
            case GrantGone(grant=grant):
                return admin_pb2.WatchResponse(removed_lease_id=grant.claims.lease_id)
            case TicketPut(ticket=ticket):
                entry = self._state.entry(ticket)
                status = ticket_status(entry, self._state) if entry else None
                return admin_pb2.WatchResponse(ticket=status)
            case TicketGone(ticket=ticket):
                return admin_pb2.WatchResponse(removed_ticket_id=ticket.ticket_id)
            case _:
                assert_never(change)


async def _described(
    keys: Sequence[_Key], describe: Callable[[_Key], _Status | None]
) -> AsyncGenerator[_Status]:
    """Describe the objects that the keys name, and let other tasks run after each portion.

    Objects that end during such a pause are left out.
    """
    for index, key in enumerate(keys):
        if index % PORTION == 0:
            await asyncio.sleep(0)
        if status := describe(key):
            yield status
