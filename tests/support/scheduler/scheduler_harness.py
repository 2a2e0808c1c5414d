"""A real scheduler on a socket; the test acts as its workers, callers and operators."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
from prometheus_client import CollectorRegistry
from support.fabric.in_process import failure_of
from support.scheduler.watching_operator import Operator
from support.time_limits import WITHIN_S

from duplane.fabric.bounds import MAX_CLAIM_TIMEOUT_S
from duplane.fabric.channel import open_channel
from duplane.fabric.errors import FabricError, from_rpc
from duplane.fabric.lease_signing import LeaseVerifier
from duplane.fabric.monitoring.spans import Telemetry
from duplane.fabric.v1 import (
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

_names = itertools.count(1)


def slot_reports(*states: registry_pb2.SlotState) -> list[registry_pb2.SlotReport]:
    return [registry_pb2.SlotReport(slot=slot, state=state) for slot, state in enumerate(states)]


def register_message(worker_id: str = "w", slot_count: int = 1, **fields: Any) -> Any:
    """Return a valid registration, with some fields replaced."""
    said: dict[str, Any] = {
        "worker_id": worker_id,
        "incarnation": f"{worker_id}/1",
        "address": "127.0.0.1:1",
        "kinds": [AUDIO],
        "slots": slot_reports(*[FREE] * slot_count),
    }
    return registry_pb2.Register(**{**said, **fields})


class SchedulerHarness:
    """One scheduler, and all connections of a test to it."""

    store = "memory:"  # a test that runs with every store changes this value

    def __init__(self, settings: SchedulerSettings, telemetry: Telemetry | None) -> None:
        self.settings = settings
        self._telemetry = telemetry
        self.address = settings.listen
        self.metrics = CollectorRegistry()  # metrics of the running scheduler
        self._serving: contextlib.AsyncExitStack | None = None
        self._scheduler: Scheduler | None = None
        self._open = contextlib.AsyncExitStack()

    @classmethod
    @contextlib.asynccontextmanager
    async def running(
        cls, telemetry: Telemetry | None = None, **settings: Any
    ) -> AsyncGenerator[SchedulerHarness]:
        defaults: dict[str, Any] = {
            "listen": "127.0.0.1:0",
            "store": cls.store,
            "resume_grace_s": 0.001,
            "claim_timeout_s": MAX_CLAIM_TIMEOUT_S,  # no grant expires while a test waits
        }
        harness = cls(SchedulerSettings(**{**defaults, **settings}), telemetry)
        await harness.start()
        try:
            yield harness
        finally:
            await harness._open.aclose()
            await harness.stop()

    async def start(self) -> None:
        """Start the scheduler. A restart uses the same address."""
        scheduler = Scheduler(replace(self.settings, listen=self.address), self._telemetry)
        self.metrics = scheduler.metrics.registry
        serving = contextlib.AsyncExitStack()
        tasks = await serving.enter_async_context(asyncio.TaskGroup())
        serving.push_async_callback(scheduler.stop)
        self.address = await scheduler.start(tasks)
        self._serving = serving
        self._scheduler = scheduler

    async def stop(self) -> None:
        if self._serving:
            await self._serving.aclose()
            self._serving = None

    async def kill(self) -> None:
        """End the scheduler without cleanup, as a kill does.

        The store is stopped first, so that nothing is cleaned up in it.
        """
        assert self._scheduler
        running_store, *_ = self._scheduler._loops
        running_store.cancel()
        await asyncio.wait([running_store])
        await self.stop()

    async def channel(self) -> grpc.aio.Channel:
        channel = open_channel(self.address)
        self._open.push_async_callback(channel.close)
        return channel

    async def worker(self, worker_id: str = "w", slot_count: int = 1, **fields: Any) -> FakeWorker:
        """Attach a worker."""
        worker = FakeWorker(await self.channel(), register_message(worker_id, slot_count, **fields))
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
        """Call AcquireLease `count` times.

        Each call starts when the call before it has a position.
        """
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

    async def revoke(self, lease_id: str) -> None:
        """Give a lease back as if its holder did, whose key the test does not have."""
        assert self._scheduler
        state, store = self._scheduler._leases._state, self._scheduler._store
        await store.give_back(state.grants[lease_id])

    async def release(self, lease_id: str, **fields: Any) -> None:
        stub = lease_pb2_grpc.LeaseServiceStub(await self.channel())
        await stub.ReleaseLease(lease_pb2.ReleaseLeaseRequest(lease_id=lease_id, **fields))


class FakeWorker:
    """A worker without sessions.

    It attaches, accepts leases, and reports the slots that a test sets.
    """

    def __init__(self, channel: grpc.aio.Channel, register: registry_pb2.Register) -> None:
        self.register = register
        self.slots = list(register.slots)
        self.received: list[registry_pb2.AttachResponse] = []
        self.failure: FabricError | None = None
        self.registered = registry_pb2.Registered()
        self.obeys_revokes = True
        self._stub = registry_pb2_grpc.RegistryServiceStub(channel)
        self._news = asyncio.Condition()
        self._reading: asyncio.Task[None] | None = None
        self._call: Any = None

    async def attach(self) -> None:
        """Open a stream and wait for the registration."""
        await self.open_with(registry_pb2.AttachRequest(register=self.register))

    async def open_with(self, first: registry_pb2.AttachRequest | None) -> None:
        """Open a stream with any first message, or none, and wait for the registration."""
        self._call = self._stub.Attach()
        self._reading = asyncio.create_task(self._read(self._call))
        if first:
            await self._call.write(first)
        self.registered = await self._first("registered")

    async def attach_again(self) -> None:
        """Open a new stream as the same process, and register the slots in their current state."""
        del self.register.slots[:]
        self.register.slots.extend(self.slots)
        self.received.clear()
        self.failure = None
        await self.attach()

    async def _read(self, call: Any) -> None:
        failure = None
        try:
            async for message in call:
                if message.HasField("revoke") and self.obeys_revokes:
                    await self.obey(message.revoke)
                async with self._news:
                    self.received.append(message)
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
        async with asyncio.timeout(WITHIN_S), self._news:
            await self._news.wait_for(lambda: is_true() or self.failure is not None)
        if self.failure and not is_true():
            raise self.failure

    async def ended(self) -> FabricError:
        """Wait for the stream to fail."""
        await asyncio.wait_for(self.lost(), WITHIN_S)
        assert self.failure
        return self.failure

    async def lost(self) -> None:
        """Wait without a time limit for the end of the stream."""
        async with self._news:
            await self._news.wait_for(lambda: self.failure is not None)

    async def revoked(self) -> registry_pb2.Revoke:
        """Wait for a Revoke message."""
        return await self._first("revoke")

    async def _first(self, kind: str) -> Any:
        """Wait for a message of this kind, and return the first one."""
        await self.until(lambda: any(one.HasField(kind) for one in self.received))
        return next(getattr(one, kind) for one in self.received if one.HasField(kind))

    async def obey(self, revoke: registry_pb2.Revoke) -> None:
        """Raise the slot's fencing number to the number of the revoke, and report the slot."""
        slot = self.slots[revoke.slot]
        slot.fencing_number = max(slot.fencing_number, revoke.fencing_number)
        # The stream may be lost.
        with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
            await self.report()

    async def report(self, **fields: Any) -> None:
        report = registry_pb2.Report(**{"slots": self.slots, **fields})
        await self._call.write(registry_pb2.AttachRequest(report=report))

    async def send(self, message: registry_pb2.AttachRequest) -> None:
        await self._call.write(message)

    async def claim(self, granted: lease_pb2.Granted) -> lease_pb2.LeaseClaims:
        """Verify and accept a lease as a worker does, or fail the test."""
        verifier = LeaseVerifier()
        verifier.trust(self.registered.verification_keys, 0)
        claims = verifier.verify(granted.lease, 0)
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
        """Report a slot as CLEANING, then in its final state."""
        self.slots[slot].state = CLEANING
        await self.report()
        seen = self.slots[slot].fencing_number
        self.slots[slot].CopyFrom(
            registry_pb2.SlotReport(slot=slot, state=state, fencing_number=seen)
        )
        await self.report()

    async def leave(self) -> None:
        """End the stream as planned."""
        await self.report(is_leaving=True)
        await self._call.done_writing()
        if self._reading:
            await self._reading

    async def vanish(self) -> None:
        """Cancel the stream, like a killed process."""
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
    def place(self) -> dict[str, Any]:
        """The fields with which a request returns to the place of this call."""
        last = self.queued[-1] if self.queued else lease_pb2.Queued()
        return {"ticket_id": last.ticket_id, "ticket_proof": last.ticket_proof}

    @property
    def position(self) -> int:
        return self.queued[-1].position

    async def read(self) -> lease_pb2.AcquireLeaseResponse:
        """Return the next message, or raise FabricError."""
        try:
            async with asyncio.timeout(WITHIN_S):
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
        """Wait until the call has this position in the queue."""
        while not (self.queued and self.position == position):
            response = await self.read()
            assert response.HasField("queued"), "granted before its turn"

    async def granted(self) -> lease_pb2.Granted:
        """Wait for the grant and return it."""
        while True:
            response = await self.read()
            if response.HasField("granted"):
                return response.granted

    async def refused(self) -> FabricError:
        """Wait for the call to fail."""
        return await failure_of(self.read)

    async def vanish(self) -> None:
        """Cancel the call."""
        self._call.cancel()
