"""A real worker on a loopback port, with a scripted model and a scheduler that a test controls."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import grpc.aio
import numpy as np
import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import Sampler
from support.fabric.in_process import LocalWorker, failure_of, no_task_left
from support.time_limits import WITHIN_S
from support.worker.fake_scheduler import FakeScheduler
from support.worker.scripted_model import ScriptedModel

from duplane.fabric.channel import open_channel
from duplane.fabric.client import FabricClient
from duplane.fabric.converse import ConverseStream
from duplane.fabric.errors import FabricError
from duplane.fabric.monitoring.spans import Telemetry
from duplane.fabric.v1 import (
    lease_pb2,
    registry_pb2,
    session_pb2,
    session_pb2_grpc,
    trace_pb2,
)
from duplane.worker.engine.device_thread import DeviceThread
from duplane.worker.engine.inbox import Entry
from duplane.worker.engine.slot_channel import SlotChannel
from duplane.worker.models.interface import Device

WORKER_ID = "worker-under-test"
ChatResponses = AsyncIterator[session_pb2.ChatResponse]


def pcm(value: float = 0.0, seconds: float = 1.0) -> bytes:
    """Return 16 kHz audio of one value; 0 makes the scripted model listen."""
    return np.full(int(16_000 * seconds), value, "<f4").tobytes()


def unit(sequence: int, value: float = 0.0, **fields: Any) -> session_pb2.Unit:
    return session_pb2.Unit(sequence=sequence, **{"audio": pcm(value), **fields})


class Rig(LocalWorker):
    """The worker under test, with its model, scheduler and clients.

    `device` replaces the model; it must have as many slots.
    """

    def __init__(
        self,
        model: ScriptedModel,
        scheduler: FakeScheduler,
        device: Device | None,
        sampler: Sampler | None,
        **settings: Any,
    ) -> None:
        self.model = model
        self.scheduler = scheduler
        self.spans = InMemorySpanExporter()
        telemetry = Telemetry("worker", SimpleSpanProcessor(self.spans), sampler)
        defaults = {"worker_id": WORKER_ID, "slot_count": model.constants.slot_count}
        super().__init__(device or model, telemetry, **{**defaults, **settings})
        self._numbers = itertools.count(1)
        self._last_numbers: dict[int, int] = {}
        self._claimed_numbers: dict[int, int] = {}  # the last fencing number that a slot accepted
        self._received_count = 0
        self._received_more = asyncio.Event()

    def count_units(self, patch: pytest.MonkeyPatch) -> None:
        """From now on, count the units that the worker puts into inboxes."""
        put = DeviceThread.put

        def counted(thread: DeviceThread, channel: SlotChannel, entry: Entry) -> None:
            put(thread, channel, entry)
            self._received_count += 1
            self._received_more.set()

        patch.setattr(DeviceThread, "put", counted)

    async def received(self, count: int) -> None:
        """Wait until the worker has put `count` units into inboxes since `count_units`."""
        async with asyncio.timeout(WITHIN_S):
            while self._received_count < count:
                self._received_more.clear()
                await self._received_more.wait()

    @property
    def address(self) -> str:
        return self.scheduler.registers[-1].address

    def claims(self, slot: int = 0, **claims: Any) -> lease_pb2.LeaseClaims:
        number = self._last_numbers[slot] = next(self._numbers)
        lease_claims = lease_pb2.LeaseClaims(
            **{
                "lease_id": f"lease-{number}",
                "worker_id": WORKER_ID,
                "worker_epoch": self.scheduler.epoch,
                "slot": slot,
                "fencing_number": number,
                "kind": lease_pb2.SESSION_KIND_AUDIO_DUPLEX,
                "session_id": f"session-{number}",
                **claims,
            }
        )
        if not lease_claims.HasField("expire_time"):
            lease_claims.expire_time.FromDatetime(datetime.now(UTC) + timedelta(seconds=60))
        return lease_claims

    def last_number(self, slot: int) -> int:
        """Return the last fencing number that was granted on a slot."""
        return self._last_numbers[slot]

    def grant(self, slot: int = 0, **claims: Any) -> lease_pb2.Granted:
        lease_claims = self.claims(slot, **claims)
        granted = lease_pb2.Granted(
            lease=self.scheduler.signer.sign(lease_claims),
            lease_id=lease_claims.lease_id,
            worker_address=self.address,
        )
        granted.claim_timeout.FromSeconds(60)
        return granted

    @contextlib.asynccontextmanager
    async def call(self, channel: grpc.aio.Channel | None = None) -> AsyncGenerator[Client]:
        """Begin a Converse call that makes no claim."""
        own = channel or open_channel(self.address)
        stub: session_pb2_grpc.SessionServiceAsyncStub = session_pb2_grpc.SessionServiceStub(own)
        call = stub.Converse()
        try:
            yield Client(call, lease_pb2.Granted())
        finally:
            call.cancel()
            if own is not channel:
                await own.close()

    @contextlib.asynccontextmanager
    async def claimed(
        self,
        granted: lease_pb2.Granted | None = None,
        trace: trace_pb2.TraceContext | None = None,
    ) -> AsyncGenerator[Client]:
        granted = granted or self.grant()
        async with self.call() as client:
            await client.claim(granted, trace)
            claims = lease_pb2.LeaseClaims.FromString(granted.lease.claims)
            self.note_claimed(claims.slot, claims.fencing_number)
            yield client

    @contextlib.asynccontextmanager
    async def opened(
        self,
        granted: lease_pb2.Granted | None = None,
        settings: session_pb2.Open | None = None,
        trace: trace_pb2.TraceContext | None = None,
    ) -> AsyncGenerator[Client]:
        async with self.claimed(granted, trace) as client:
            await client.open(settings or session_pb2.Open())
            yield client

    def note_claimed(self, slot: int, fencing_number: int) -> None:
        """Record that the worker has accepted a lease."""
        self._claimed_numbers[slot] = fencing_number

    async def all_free(self, *slots: int) -> None:
        """Wait until the worker has reported these slots as free (default: all slots).

        A report from before the last claim of a slot does not count.
        """
        wanted = slots or range(self.model.constants.slot_count)

        def is_free(slot: int) -> bool:
            report = self.scheduler.report.slots[slot]
            is_new = report.fencing_number >= self._claimed_numbers.get(slot, 0)
            return is_new and report.state == registry_pb2.SLOT_STATE_FREE

        await self.scheduler.until(lambda: all(map(is_free, wanted)))


class Client(ConverseStream):
    """A client's stream whose reads have a time limit."""

    async def claim(
        self, granted: lease_pb2.Granted, trace: trace_pb2.TraceContext | None = None
    ) -> session_pb2.Claimed:
        claim = session_pb2.Claim(lease=granted.lease, trace=trace)
        await self.write(session_pb2.ConverseRequest(claim=claim))
        return await self._expect("claimed")

    async def read(self) -> session_pb2.ConverseResponse:
        async with asyncio.timeout(WITHIN_S):
            return await super().read()

    async def _expect(self, kind: str) -> Any:
        response = await self.read()
        assert response.WhichOneof("message") == kind, response
        return getattr(response, kind)

    async def delta(self) -> session_pb2.Delta:
        return await self._expect("delta")

    async def failed(self) -> session_pb2.Failed:
        return await self._expect("failed")

    async def leaving(self) -> session_pb2.Leaving:
        return await self._expect("leaving")

    async def staying(self) -> session_pb2.Staying:
        return await self._expect("staying")

    async def closed(self) -> session_pb2.Closed:
        return await self._expect("closed")

    async def end(self) -> session_pb2.Closed:
        """Ask the worker to end the session; return its answer."""
        await self.close()
        return await self.closed()

    async def refused(self) -> FabricError:
        """Read until the call fails, and return the failure."""
        return await failure_of(self.read)

    async def half_close(self) -> None:
        await self._call.done_writing()

    def vanish(self) -> None:
        self._call.cancel()


async def refusal(rig: Rig, granted: lease_pb2.Granted) -> FabricError:
    """Send a claim that the worker must refuse, and return the refusal."""
    async with rig.call() as client:
        await client.write(
            session_pb2.ConverseRequest(claim=session_pb2.Claim(lease=granted.lease))
        )
        return await client.refused()


def says(*parts: str | session_pb2.ChatPart) -> session_pb2.ChatMessage:
    return session_pb2.ChatMessage(
        role=session_pb2.CHAT_ROLE_USER,
        parts=[session_pb2.ChatPart(text=p) if isinstance(p, str) else p for p in parts],
    )


def asks(text: str = "one two three", **fields: Any) -> session_pb2.ChatRequest:
    return session_pb2.ChatRequest(**{"messages": [says(text)], **fields})


@contextlib.asynccontextmanager
async def chat(
    rig: Rig, request: session_pb2.ChatRequest, slot: int = 0, **claims: Any
) -> AsyncGenerator[ChatResponses]:
    granted = rig.grant(slot, **{"kind": lease_pb2.SESSION_KIND_CHAT, **claims})
    async with (
        FabricClient([rig.scheduler.address]) as client,
        client.chat(granted, request) as responses,
    ):
        yield responses


async def chat_answer(
    rig: Rig, request: session_pb2.ChatRequest, slot: int = 0
) -> list[session_pb2.ChatResponse]:
    async with asyncio.timeout(WITHIN_S), chat(rig, request, slot) as responses:
        answer = [response async for response in responses]
    rig.note_claimed(slot, rig.last_number(slot))
    return answer


async def chat_refusal(rig: Rig, request: session_pb2.ChatRequest, **claims: Any) -> FabricError:
    async with asyncio.timeout(WITHIN_S), chat(rig, request, **claims) as responses:
        return await chat_failure(responses)


async def chat_failure(responses: ChatResponses) -> FabricError:
    """Read a chat until its call fails, and return the failure."""
    try:
        async for _ in responses:
            pass
    except FabricError as error:
        return error
    raise AssertionError("the call ended well")


@contextlib.asynccontextmanager
async def running_worker(
    model: ScriptedModel | None = None,
    *,
    scheduler: FakeScheduler | None = None,
    schedulers: Sequence[str] = (),
    is_broken_at_end: bool = False,
    start_within_s: float = WITHIN_S,
    sampler: Sampler | None = None,
    device: Device | None = None,
    **settings: Any,
) -> AsyncIterator[Rig]:
    """Run a worker; at the end, assert that every slot is free and no task is left.

    The worker attaches to `scheduler`, which must be running, or to a new scheduler. `schedulers`
    are additional addresses. `device` replaces the scripted model; it must have as many slots.
    """
    if scheduler is None:
        scheduler = FakeScheduler()
        await scheduler.start()
    model, addresses = model or ScriptedModel(), (scheduler.address, *schedulers)
    rig = Rig(model, scheduler, device, sampler, schedulers=addresses, **settings)
    patch = pytest.MonkeyPatch()
    rig.count_units(patch)
    try:
        with no_task_left("duplane/worker/"):
            await scheduler.until(
                lambda: bool(scheduler.registers) and scheduler.report_count > 0, start_within_s
            )
            yield rig
            rig.model.let_go()
            if not rig.task.done():
                # A draining worker may end before its last report arrives.
                if not is_broken_at_end and not rig.shutdown.is_draining:
                    await rig.all_free()
                await rig.drain()
            assert rig.model.violations == []
    finally:
        patch.undo()
        rig.model.let_go()
        await rig.cancel()
        await scheduler.stop()
