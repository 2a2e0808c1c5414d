"""An operator who watches the scheduler of a test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc.aio
from support.time_limits import WITHIN_S

from duplane.fabric.errors import FabricError, from_rpc
from duplane.fabric.v1 import admin_pb2, admin_pb2_grpc


class Operator:
    """One Watch call, and the state that results from its messages."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.stub: admin_pb2_grpc.AdminServiceAsyncStub = admin_pb2_grpc.AdminServiceStub(channel)
        self.has_snapshot = False
        self.store_refusal = ""
        self.failure: FabricError | None = None
        self.steps: list[admin_pb2.WatchResponse] = []
        self.workers: dict[str, admin_pb2.WorkerStatus] = {}  # attached
        self.lost: dict[str, admin_pb2.WorkerStatus] = {}
        self.leases: dict[str, admin_pb2.LeaseStatus] = {}
        self.tickets: dict[str, admin_pb2.TicketStatus] = {}
        self._news = asyncio.Condition()
        self._call = self.stub.Watch(admin_pb2.WatchRequest())
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async for step in self._call:
                async with self._news:
                    self.steps.append(step)
                    self._take(step)
                    self._news.notify_all()
        except grpc.aio.AioRpcError as error:
            async with self._news:
                self.failure = from_rpc(error)
                self._news.notify_all()
        except asyncio.CancelledError:
            pass

    def _take(self, step: admin_pb2.WatchResponse) -> None:
        match step.WhichOneof("event"):
            case "snapshot":
                assert not step.snapshot.has_more, "the fabrics of tests fit into one part"
                self.has_snapshot = True
                self.store_refusal = step.snapshot.store_refusal
                self.workers, self.lost = {}, {}
                for one in step.snapshot.workers:
                    self._put_worker(one)
                self.leases = {one.claims.lease_id: one for one in step.snapshot.leases}
                self.tickets = {one.ticket_id: one for one in step.snapshot.tickets}
            case "worker":
                self._put_worker(step.worker)
            case "removed_worker_id":
                self._drop_worker(step.removed_worker_id)
            case "lease":
                self.leases[step.lease.claims.lease_id] = step.lease
            case "removed_lease_id":
                self.leases.pop(step.removed_lease_id, None)
            case "ticket":
                self.tickets[step.ticket.ticket_id] = step.ticket
            case "removed_ticket_id":
                self.tickets.pop(step.removed_ticket_id, None)
            case _:
                raise AssertionError(step)

    def _put_worker(self, status: admin_pb2.WorkerStatus) -> None:
        self._drop_worker(status.worker.worker_id)
        workers = self.lost if status.HasField("lost_duration") else self.workers
        workers[status.worker.worker_id] = status

    def _drop_worker(self, worker_id: str) -> None:
        self.workers.pop(worker_id, None)
        self.lost.pop(worker_id, None)

    async def until(self, is_true: Callable[[Operator], bool]) -> None:
        """Wait until the received state satisfies a condition."""
        async with asyncio.timeout(WITHIN_S), self._news:
            await self._news.wait_for(lambda: is_true(self) or self.failure is not None)
        if self.failure and not is_true(self):
            raise self.failure

    async def drain(self, worker_id: str, **fields: bool) -> None:
        try:
            await self.stub.DrainWorker(admin_pb2.DrainWorkerRequest(worker_id=worker_id, **fields))
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error) from None

    async def undrain(self, worker_id: str) -> None:
        try:
            await self.stub.UndrainWorker(admin_pb2.UndrainWorkerRequest(worker_id=worker_id))
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error) from None

    async def cancel(self, ticket_id: str) -> None:
        try:
            await self.stub.CancelTicket(admin_pb2.CancelTicketRequest(ticket_id=ticket_id))
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error) from None

    async def close(self) -> None:
        self._call.cancel()
        await self._reading
