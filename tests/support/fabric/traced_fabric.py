"""Edge, scheduler and worker in the test's process; they export their spans to an OTLP receiver."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pybase64
import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace.sampling import Sampler
from support.edge.live_edge import UPDATE, receive, send
from support.fabric.in_process import LocalWorker, running_edge
from support.monitoring.otlp import SpanReceiver
from support.scheduler.scheduler_harness import SchedulerHarness
from support.time_limits import WITHIN_S
from support.worker.scripted_model import ScriptedModel
from support.worker.worker_harness import pcm
from websockets.asyncio.client import ClientConnection, connect

from duplane.edge.server import Edge
from duplane.edge.settings import Limits
from duplane.fabric.monitoring import spans
from duplane.fabric.monitoring.span_queue import SpanQueue
from duplane.fabric.monitoring.spans import Telemetry


def set_deadline(monkeypatch: pytest.MonkeyPatch, spans_class: type, deadline_ns: int) -> None:
    """Let the spans of a session in the edge or in the worker use this deadline of a unit."""
    fixed = property(lambda _: deadline_ns, lambda *_: None)
    monkeypatch.setattr(spans_class, "_deadline_ns", fixed, raising=False)


def append(value: float) -> dict[str, Any]:
    """Return a client's event with a second of audio; 0 makes the model listen."""
    return {"type": "input_audio_buffer.append", "audio": pybase64.b64encode(pcm(value)).decode()}


def attributes(span: Span) -> dict[str, Any]:
    """Return the names and values of the attributes of a received span."""
    found: dict[str, Any] = {}
    for one in span.attributes:
        found[one.key] = getattr(one.value, one.value.WhichOneof("value") or "")
    return found


async def begin_session(client: ClientConnection) -> None:
    """Wait until the worker offers a slot, and open the conversation."""
    while (event := await receive(client))["type"] != "session.queue_done":
        assert event["type"] in ("session.queued", "session.queue_update"), event
    await send(client, UPDATE)
    assert (await receive(client))["type"] == "session.created"


class TracedFabric:
    """A running fabric with one worker, which runs a scripted model."""

    def __init__(self, scheduler: str, model: ScriptedModel, receiver: SpanReceiver) -> None:
        self.scheduler = scheduler
        self.model = model
        self.receiver = receiver
        self.queues: dict[str, SpanQueue] = {}
        self.edge: Edge | None = None

    def telemetry(self, role: str, sampler: Sampler | None) -> Telemetry:
        endpoint = f"http://{self.receiver.address}"
        queue = self.queues[role] = SpanQueue(OTLPSpanExporter(endpoint=endpoint, insecure=True))
        return Telemetry(role, queue, sampler)

    def connect(self, query: str = "mode=audio", **options: Any) -> connect:
        assert self.edge
        url = f"ws://{self.edge.address}/v1/realtime?{query}"
        return connect(url, compression=None, max_size=None, proxy=None, **options)

    async def flushed(self) -> Sequence[Span]:
        """Export and return all spans that have ended."""
        for queue in self.queues.values():
            await asyncio.to_thread(queue.force_flush)
        return list(self.receiver.spans)

    async def ended(self, session_count: int) -> Sequence[Span]:
        """Wait until this many sessions have ended and their slots are free; return all spans."""

        def is_over(found: Sequence[Span]) -> bool:
            return sum(span.name == spans.WORKER_CLEANUP for span in found) >= session_count

        await self.receiver.until(is_over, WITHIN_S)
        assert self.edge
        await self.edge.idle()
        return await self.flushed()


@contextlib.asynccontextmanager
async def traced_fabric(
    slot_count: int = 2,
    sampler: Sampler | None = None,
    limits: Limits | None = None,
    edge_settings: Mapping[str, Any] = MappingProxyType({}),
    **worker_settings: Any,
) -> AsyncGenerator[TracedFabric]:
    """Run a fabric; at the end wait until every slot is free."""
    async with contextlib.AsyncExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        receiver = await stack.enter_async_context(SpanReceiver.serving())
        fabric = TracedFabric("", ScriptedModel(slot_count), receiver)
        telemetry = fabric.telemetry("scheduler", sampler)
        stack.push_async_callback(asyncio.to_thread, telemetry.shutdown)
        scheduler = await stack.enter_async_context(SchedulerHarness.running(telemetry))
        telemetry = fabric.telemetry("worker", sampler)
        worker = LocalWorker(
            fabric.model,
            telemetry,
            schedulers=(scheduler.address,),
            slot_count=slot_count,
            **worker_settings,
        )
        stack.push_async_callback(_stop, worker, fabric)
        telemetry = fabric.telemetry("edge", sampler)
        stack.push_async_callback(asyncio.to_thread, telemetry.shutdown)
        fabric.scheduler = scheduler.address
        fabric.edge = await stack.enter_async_context(
            running_edge(
                scheduler.address,
                telemetry=telemetry,
                limits=limits or Limits(),
                **edge_settings,
            )
        )
        yield fabric


async def _stop(worker: LocalWorker, fabric: TracedFabric) -> None:
    await fabric.flushed()  # the stopping worker exports its last spans to the receiver
    fabric.model.let_go()
    await worker.drain()
    assert fabric.model.violations == []
