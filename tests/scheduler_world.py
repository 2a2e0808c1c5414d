"""A real scheduler on a real socket, with workers, callers and operators that speak to it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio

from duplane.fabric.channel import open_channel
from duplane.fabric.errors import FabricError, from_rpc
from duplane.fabric.lease import LeaseVerifier
from duplane.fabric.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    lease_pb2,
    lease_pb2_grpc,
    registry_pb2,
    registry_pb2_grpc,
)
from duplane.scheduler.service import Scheduler
from duplane.scheduler.settings import SchedulerSettings

AUDIO = lease_pb2.SESSION_KIND_AUDIO_DUPLEX
OMNI = lease_pb2.SESSION_KIND_OMNI_DUPLEX
CHAT = lease_pb2.SESSION_KIND_CHAT
FREE = registry_pb2.SLOT_STATE_FREE
OCCUPIED = registry_pb2.SLOT_STATE_OCCUPIED
CLEANING = registry_pb2.SLOT_STATE_CLEANING
BROKEN = registry_pb2.SLOT_STATE_BROKEN

BOUND_S = 5.0  # of every wait; reaching it fails the test
_names = itertools.count(1)


def slot_reports(*states: registry_pb2.SlotState) -> list[registry_pb2.SlotReport]:
    return [registry_pb2.SlotReport(slot=slot, state=state) for slot, state in enumerate(states)]


def register_message(worker_id: str = "w", slot_count: int = 1, **fields: Any) -> Any:
    """A registration; any field can be given another value."""
    said: dict[str, Any] = {
        "worker_id": worker_id,
        "incarnation": f"{worker_id}/1",
        "address": "127.0.0.1:1",
        "kinds": [AUDIO],
        "slots": slot_reports(*[FREE] * slot_count),
    }
    return registry_pb2.Register(**{**said, **fields})


class World:
    """One scheduler and everything that is open towards it."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self.settings = settings
        self.address = settings.listen
        self._serving: contextlib.AsyncExitStack | None = None
        self._open = contextlib.AsyncExitStack()

    @classmethod
    @contextlib.asynccontextmanager
    async def running(cls, **settings: Any) -> AsyncGenerator[World]:
        quick: dict[str, Any] = {"listen": "127.0.0.1:0", "resume_grace_s": 0.001}
        world = cls(SchedulerSettings(**{**quick, **settings}))
        await world.start()
        try:
            yield world
        finally:
            await world._open.aclose()
            await world.stop()

    async def start(self) -> None:
        """Serve, at the same address as before if there was one."""
        scheduler = Scheduler(replace(self.settings, listen=self.address))
        serving = contextlib.AsyncExitStack()
        tasks = await serving.enter_async_context(asyncio.TaskGroup())
        serving.push_async_callback(scheduler.stop)
        self.address = await scheduler.start(tasks)
        self._serving = serving

    async def stop(self) -> None:
        if self._serving:
            await self._serving.aclose()
            self._serving = None

    async def channel(self) -> grpc.aio.Channel:
        channel = open_channel(self.address)
        self._open.push_async_callback(channel.close)
        return channel

    async def worker(self, worker_id: str = "w", slot_count: int = 1, **fields: Any) -> Worker:
        """Attach a worker."""
        worker = Worker(await self.channel(), register_message(worker_id, slot_count, **fields))
        self._open.push_async_callback(worker.vanish)
        await worker.attach()
        return worker

    async def caller(self, kind: lease_pb2.SessionKind = AUDIO, **fields: Any) -> Caller:
        """Call AcquireLease."""
        fields.setdefault("request_id", f"request-{next(_names)}")
        request = lease_pb2.AcquireLeaseRequest(kind=kind, **fields)
        caller = Caller(await self.channel(), request)
        self._open.push_async_callback(caller.vanish)
        return caller

    async def queue(self, count: int) -> list[Caller]:
        """Call AcquireLease `count` times, each once the one before it stands in the queue."""
        callers: list[Caller] = []
        for position in range(1, count + 1):
            callers.append(await self.caller())
            await callers[-1].stands(position)
        return callers

    async def operator(self) -> Operator:
        """Watch the fabric."""
        operator = Operator(await self.channel())
        self._open.push_async_callback(operator.close)
        await operator.until(lambda seen: seen.has_snapshot)
        return operator

    async def release(self, lease_id: str) -> None:
        stub = lease_pb2_grpc.LeaseServiceStub(await self.channel())
        await stub.ReleaseLease(lease_pb2.ReleaseLeaseRequest(lease_id=lease_id))


class Worker:
    """The attaching half of a worker: it admits what it is shown and reports as told."""

    def __init__(self, channel: grpc.aio.Channel, register: registry_pb2.Register) -> None:
        self.register = register
        self.slots = list(register.slots)
        self.told: list[registry_pb2.AttachResponse] = []
        self.failure: FabricError | None = None
        self.registered = registry_pb2.Registered()
        self._stub = registry_pb2_grpc.RegistryServiceStub(channel)
        self._news = asyncio.Condition()
        self._reading: asyncio.Task[None] | None = None
        self._call: Any = None

    async def attach(self) -> None:
        """Open a stream and wait to be registered."""
        await self.open_with(registry_pb2.AttachRequest(register=self.register))
        self.registered = next(one.registered for one in self.told if one.HasField("registered"))

    async def open_with(self, first: registry_pb2.AttachRequest | None) -> None:
        """Open a stream with any first message, or none, and wait to be registered."""
        self._call = self._stub.Attach()
        self._reading = asyncio.create_task(self._read(self._call))
        if first:
            await self._call.write(first)
        await self.until(lambda: any(one.HasField("registered") for one in self.told))

    async def attach_again(self) -> None:
        """Open another stream over the old one, as the same process."""
        del self.register.slots[:]
        self.register.slots.extend(self.slots)
        self.told.clear()
        self.failure = None
        await self.attach()

    async def _read(self, call: Any) -> None:
        failure = None
        try:
            async for message in call:
                async with self._news:
                    self.told.append(message)
                    self._news.notify_all()
        except grpc.aio.AioRpcError as error:
            failure = from_rpc(error)
        except asyncio.CancelledError:
            pass
        async with self._news:
            if call is self._call:
                self.failure = failure
            self._news.notify_all()

    async def until(self, is_true: Callable[[], bool]) -> None:
        async with asyncio.timeout(BOUND_S), self._news:
            await self._news.wait_for(lambda: is_true() or self.failure is not None)
        if self.failure and not is_true():
            raise self.failure

    async def ended(self) -> FabricError:
        """Wait for the stream to fail."""
        async with asyncio.timeout(BOUND_S), self._news:
            await self._news.wait_for(lambda: self.failure is not None)
        assert self.failure
        return self.failure

    async def revoked(self) -> registry_pb2.Revoke:
        """Wait to be told that a lease is void."""
        await self.until(lambda: any(one.HasField("revoke") for one in self.told))
        return next(one.revoke for one in self.told if one.HasField("revoke"))

    async def report(self, **fields: Any) -> None:
        report = registry_pb2.Report(**{"slots": self.slots, **fields})
        await self._call.write(registry_pb2.AttachRequest(report=report))

    async def send(self, message: registry_pb2.AttachRequest) -> None:
        await self._call.write(message)

    async def claim(self, granted: lease_pb2.Granted) -> lease_pb2.LeaseClaims:
        """Accept a lease as a worker would, or fail the test."""
        verifier = LeaseVerifier()
        verifier.trust(list(self.registered.verification_keys))
        claims = verifier.verify(granted.lease)
        slot = self.slots[claims.slot]
        assert claims.worker_id == self.register.worker_id
        assert claims.worker_epoch == self.registered.worker_epoch
        assert claims.fencing_number > slot.fencing_number
        assert slot.state == FREE
        slot.state = OCCUPIED
        slot.lease_id, slot.session_id = claims.lease_id, claims.session_id
        slot.fencing_number, slot.kind = claims.fencing_number, claims.kind
        await self.report()
        return claims

    async def finish(self, slot: int, state: registry_pb2.SlotState = FREE) -> None:
        """End the session of a slot: clean it, then free it."""
        self.slots[slot].state = CLEANING
        await self.report()
        seen = self.slots[slot].fencing_number
        self.slots[slot].CopyFrom(
            registry_pb2.SlotReport(slot=slot, state=state, fencing_number=seen)
        )
        await self.report()

    async def leave(self) -> None:
        """End the stream in order."""
        await self._call.done_writing()
        if self._reading:
            await self._reading

    async def vanish(self) -> None:
        """Break the stream, as a killed process does."""
        if self._call:
            self._call.cancel()
        if self._reading:
            await self._reading


class Caller:
    """One AcquireLease call."""

    def __init__(self, channel: grpc.aio.Channel, request: lease_pb2.AcquireLeaseRequest) -> None:
        self.request = request
        self.queued: list[lease_pb2.Queued] = []
        self._call = lease_pb2_grpc.LeaseServiceStub(channel).AcquireLease(request)

    @property
    def ticket_id(self) -> str:
        return self.queued[-1].ticket_id

    @property
    def position(self) -> int:
        return self.queued[-1].position

    async def read(self) -> lease_pb2.AcquireLeaseResponse:
        """The next message. Raises FabricError."""
        try:
            async with asyncio.timeout(BOUND_S):
                response = await self._call.read()
                if isinstance(response, lease_pb2.AcquireLeaseResponse):
                    if response.HasField("queued"):
                        self.queued.append(response.queued)
                    return response
                code = await self._call.code()
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error) from None
        if code == grpc.StatusCode.OK:
            raise EOFError
        raise from_rpc(
            grpc.aio.AioRpcError(
                code,
                await self._call.initial_metadata(),
                await self._call.trailing_metadata(),
                details=await self._call.details(),
            )
        )

    async def stands(self, position: int) -> None:
        """Wait to be told of a position."""
        while not (self.queued and self.position == position):
            response = await self.read()
            assert response.HasField("queued"), "granted out of turn"

    async def granted(self) -> lease_pb2.Granted:
        """Wait for the grant, and the end of the call."""
        while True:
            response = await self.read()
            if response.HasField("granted"):
                return response.granted

    async def refused(self) -> FabricError:
        """Wait for the call to fail."""
        try:
            while True:
                await self.read()
        except FabricError as error:
            return error

    async def vanish(self) -> None:
        """Cancel the call."""
        self._call.cancel()


class Operator:
    """One Watch call, and the picture it draws."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.stub: admin_pb2_grpc.AdminServiceAsyncStub = admin_pb2_grpc.AdminServiceStub(channel)
        self.has_snapshot = False
        self.failure: FabricError | None = None
        self.steps: list[admin_pb2.WatchResponse] = []
        self.workers: dict[str, admin_pb2.WorkerStatus] = {}
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
                self.has_snapshot = True
                self.workers = {one.worker.worker_id: one for one in step.snapshot.workers}
                self.leases = {one.claims.lease_id: one for one in step.snapshot.leases}
                self.tickets = {one.ticket_id: one for one in step.snapshot.tickets}
            case "worker":
                self.workers[step.worker.worker.worker_id] = step.worker
            case "removed_worker_id":
                del self.workers[step.removed_worker_id]
            case "lease":
                self.leases[step.lease.claims.lease_id] = step.lease
            case "removed_lease_id":
                del self.leases[step.removed_lease_id]
            case "ticket":
                self.tickets[step.ticket.ticket_id] = step.ticket
            case "removed_ticket_id":
                del self.tickets[step.removed_ticket_id]
            case _:
                raise AssertionError(step)

    async def until(self, is_true: Callable[[Operator], bool]) -> None:
        """Wait until the picture shows something."""
        async with asyncio.timeout(BOUND_S), self._news:
            await self._news.wait_for(lambda: is_true(self) or self.failure is not None)
        if self.failure and not is_true(self):
            raise self.failure

    async def drain(self, worker_id: str) -> None:
        try:
            await self.stub.DrainWorker(admin_pb2.DrainWorkerRequest(worker_id=worker_id))
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
