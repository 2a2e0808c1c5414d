"""What operators see: the whole as it is now, and every change as it happens.

A change is written once and shared by all who watch. A reader that falls behind by more than its
bound loses what waits for it and gets the whole again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from typing import assert_never

from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.v1 import admin_pb2, registry_pb2
from duplane.scheduler.messages import lease_status, ticket_status, worker_status
from duplane.scheduler.policy import Place
from duplane.scheduler.store.base import (
    Change,
    GrantGone,
    GrantPut,
    TicketGone,
    TicketPut,
    Worker,
    WorkerGone,
    WorkerPut,
)
from duplane.scheduler.view import View

BACKLOG_LENGTH = 4096  # changes; one grant moves up to every ticket that waits


class _Reader:
    """One who watches."""

    def __init__(self) -> None:
        self.backlog: deque[admin_pb2.WatchResponse] = deque()
        self.is_behind = True  # needs the whole
        self.has_more = asyncio.Event()
        self.has_more.set()

    def push(self, message: admin_pb2.WatchResponse) -> None:
        if self.is_behind:
            return
        self.backlog.append(message)
        if len(self.backlog) > BACKLOG_LENGTH:
            self.backlog.clear()
            self.is_behind = True
        self.has_more.set()


class Feed:
    """Tells operators what the view holds."""

    def __init__(self, view: View, ticket_limit: int) -> None:
        self._view = view
        self.ticket_limit = ticket_limit
        self._reports: dict[str, registry_pb2.Report] = {}  # last, by worker id
        self._readers: set[_Reader] = set()
        self._is_closed = False
        view.listeners.append(self._on_change)

    def note_report(self, worker_id: str, report: registry_pb2.Report) -> None:
        """Remember a worker's last report."""
        self._reports[worker_id] = report

    def tell_worker(self, worker: Worker) -> None:
        """Tell that a worker has reported."""
        if self._readers:
            self._push(admin_pb2.WatchResponse(worker=self._worker_status(worker)))

    def workers(self) -> Sequence[admin_pb2.WorkerStatus]:
        """Return the workers, by id."""
        return [self._worker_status(worker) for _, worker in sorted(self._view.workers.items())]

    def leases(self) -> Sequence[admin_pb2.LeaseStatus]:
        """Return the leases, oldest first."""
        return [lease_status(grant, self._view) for grant in self._view.grants.values()]

    def tickets(self) -> Sequence[admin_pb2.TicketStatus]:
        """Return the tickets, next first."""
        return [ticket_status(place, self._view) for place in self._view.places()]

    def snapshot(self) -> admin_pb2.Snapshot:
        """Return everything."""
        return admin_pb2.Snapshot(
            workers=self.workers(),
            leases=self.leases(),
            tickets=self.tickets(),
            ticket_limit=self.ticket_limit,
        )

    async def watch(self) -> AsyncGenerator[admin_pb2.WatchResponse]:
        """Yield everything, then each change. Raises UNAVAILABLE at shutdown."""
        reader = _Reader()
        self._readers.add(reader)
        try:
            while not self._is_closed:
                await reader.has_more.wait()
                reader.has_more.clear()
                if reader.is_behind:
                    reader.is_behind = False
                    yield admin_pb2.WatchResponse(snapshot=self.snapshot())
                while reader.backlog:
                    yield reader.backlog.popleft()
        finally:
            self._readers.discard(reader)
        raise FabricError(Reason.UNAVAILABLE, "the scheduler is stopping")

    def close(self) -> None:
        """End every watch."""
        self._is_closed = True
        for reader in self._readers:
            reader.has_more.set()

    def _worker_status(self, worker: Worker) -> admin_pb2.WorkerStatus:
        return worker_status(worker, self._reports.get(worker.worker_id), self._view)

    def _push(self, message: admin_pb2.WatchResponse) -> None:
        for reader in self._readers:
            reader.push(message)

    def _on_change(self, change: Change, moved: Sequence[Place]) -> None:
        if isinstance(change, WorkerGone):
            self._reports.pop(change.worker.worker_id, None)
        if self._readers:
            self._push(self._told(change))
            for place in moved:
                status = ticket_status(place, self._view)
                self._push(admin_pb2.WatchResponse(ticket=status))

    def _told(self, change: Change) -> admin_pb2.WatchResponse:
        match change:
            case WorkerPut(worker=worker):
                return admin_pb2.WatchResponse(worker=self._worker_status(worker))
            case WorkerGone(worker=worker):
                return admin_pb2.WatchResponse(removed_worker_id=worker.worker_id)
            case GrantPut(grant=grant):
                return admin_pb2.WatchResponse(lease=lease_status(grant, self._view))
            case GrantGone(grant=grant):
                return admin_pb2.WatchResponse(removed_lease_id=grant.lease_id)
            case TicketPut(ticket=ticket):
                place = self._view.place(ticket.wish.pool, ticket.order)
                status = ticket_status(place, self._view) if place else None
                return admin_pb2.WatchResponse(ticket=status)
            case TicketGone(ticket=ticket):
                return admin_pb2.WatchResponse(removed_ticket_id=ticket.ticket_id)
            case _:
                assert_never(change)
