"""A collector that stalls or is gone: no unit is lost, and lost spans are counted."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncGenerator, Sequence

import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import (
    SimpleSpanProcessor,
    SpanExporter,
    SpanExportResult,
)
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry
from support.edge.live_edge import APPEND, UPDATE, begin, end, exchange, live_edge, receive, send
from support.monitoring.metrics import read
from support.time_limits import WITHIN_S
from support.worker.worker_harness import asks, chat_answer, running_worker, unit

from duplane.fabric.monitoring.span_queue import SpanQueue, observe_spans
from duplane.fabric.monitoring.spans import Telemetry
from duplane.fabric.process import StartError
from duplane.fabric.v1 import session_pb2
from duplane.worker.models.scripted.model import answer_loud

CAPACITY, UNITS = 16, 40
PRIVATE = "what nobody may read"
EXIT_WITHIN_S = 5.0  # the time limit of the export, with a margin for a loaded machine


@contextlib.asynccontextmanager
async def dead_collector(*, is_silent: bool) -> AsyncGenerator[str]:
    """Yield the URL of a collector that never answers, or that does not listen."""
    if not is_silent:
        yield "http://127.0.0.1:1"
        return
    ended = asyncio.Event()

    async def hold(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await ended.wait()
        writer.close()

    async with await asyncio.start_server(hold, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        ended.set()


class StalledExporter(SpanExporter):
    """Accepts no spans until a test lets it continue."""

    def __init__(self) -> None:
        self.is_let_go = threading.Event()
        self.count = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.is_let_go.wait(2 * WITHIN_S)
        self.count += len(spans)
        return SpanExportResult.SUCCESS


@pytest.fixture(autouse=True)
def small_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", str(CAPACITY))
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")


def counts(registry: CollectorRegistry) -> dict[str, float]:
    seen = read(registry)
    outcomes = ("exported", "failed", "dropped")
    return {one: seen.value("duplane_spans_total", role="edge", outcome=one) for one in outcomes}


async def test_stalled_collector_delays_no_unit_and_the_dropped_spans_are_counted() -> None:
    exporter = StalledExporter()
    queue = SpanQueue(exporter)
    telemetry = Telemetry("edge", queue)
    async with live_edge(telemetry=telemetry) as edge:
        async with edge.connect() as client, asyncio.timeout(WITHIN_S):
            await begin(client)
            for _ in range(UNITS):
                await exchange(client)
            await end(client)
        await edge.settled()
        spans = UNITS + 4  # four spans: session, claim, opening and close
        assert queue.dropped_count >= spans - CAPACITY - 4, "four are with the exporter"
        exporter.is_let_go.set()
        await asyncio.to_thread(queue.force_flush)
        assert queue.exported_count == exporter.count == spans - queue.dropped_count
        registry = CollectorRegistry()
        observe_spans(registry, "edge", queue)
        assert counts(registry) == {
            "exported": exporter.count,
            "failed": 0,
            "dropped": queue.dropped_count,
        }
    telemetry.shutdown()


async def test_collector_that_is_gone_costs_no_unit_and_the_failed_spans_are_counted() -> None:
    queue = SpanQueue(OTLPSpanExporter("http://127.0.0.1:1", insecure=True, timeout=1))
    telemetry = Telemetry("edge", queue)
    async with live_edge(telemetry=telemetry) as edge:
        async with edge.connect() as client, asyncio.timeout(WITHIN_S):
            await begin(client)
            for _ in range(5):
                await exchange(client)
            await end(client)
        await edge.settled()
        await asyncio.to_thread(queue.force_flush)
    await asyncio.to_thread(telemetry.shutdown)
    assert queue.failed_count == 9
    assert not queue.exported_count


@pytest.mark.timing
@pytest.mark.slow
@pytest.mark.parametrize("is_silent", [False, True])
async def test_dead_collector_delays_no_exit_and_the_lost_spans_are_counted(
    is_silent: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with dead_collector(is_silent=is_silent) as url:
        queue = SpanQueue(OTLPSpanExporter(url, insecure=True))
        telemetry = Telemetry("edge", queue)
        for _ in range(CAPACITY):
            telemetry.start("test").end()
        began_s = time.monotonic()
        await asyncio.to_thread(telemetry.shutdown)
        assert time.monotonic() - began_s < EXIT_WITHIN_S
    assert queue.failed_count + queue.dropped_count == CAPACITY
    assert f"{CAPACITY} spans were not exported" in caplog.text


@pytest.mark.parametrize("size", ["0", "many", "3"])
def test_queue_size_that_cannot_be_used_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, size: str
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", size)  # 3 is less than a batch
    with pytest.raises(StartError, match="OTEL_BSP_"):
        SpanQueue(StalledExporter())


def text_of(span: ReadableSpan) -> str:
    events = [(event.name, dict(event.attributes or {})) for event in span.events]
    return repr((span.name, dict(span.attributes or {}), events, span.status.description))


async def test_spans_hold_neither_audio_nor_text_nor_tokens() -> None:
    exporter = InMemorySpanExporter()
    telemetry = Telemetry("edge", SimpleSpanProcessor(exporter))
    async with live_edge(telemetry=telemetry, admin_token="the token") as edge:
        async with edge.connect() as client:
            assert (await receive(client))["type"] == "session.queue_done"
            await send(client, {**UPDATE, "session": {"instructions": PRIVATE}})
            assert (await receive(client))["type"] == "session.created"
            conversation = await edge.fabric.conversation()
            await send(client, APPEND)
            await receive(client)
            edge.fabric.on_unit = lambda unit: []
            await send(client, APPEND)
            while (await conversation.next_request()).unit.sequence != 1:
                pass
            spoken = session_pb2.Speech(text=PRIVATE, audio=b"what nobody may hear")
            delta = session_pb2.Delta(sequence=1, speech=spoken)
            conversation.say(session_pb2.ConverseResponse(delta=delta))
            await receive(client)
            await end(client)
        await edge.settled()
    async with running_worker() as rig:
        rig.model.answer = lambda unit, length: answer_loud(unit, length, PRIVATE)
        settings = session_pb2.Open(system_prompt=PRIVATE)
        async with rig.opened(settings=settings) as client:
            await client.send(unit(0, 0.5))
            assert (await client.delta()).speech.text == PRIVATE
            await client.close(PRIVATE)
            await client.closed()
        await chat_answer(rig, asks(PRIVATE), slot=1)
        await rig.all_free()
        found = [*exporter.get_finished_spans(), *rig.spans.get_finished_spans()]
    names = {span.name for span in found}
    assert {"edge.unit", "worker.unit", "worker.chat"} <= names
    secrets = (PRIVATE, "nobody may hear", "the token")
    for span in found:
        assert not [secret for secret in secrets if secret in text_of(span)], text_of(span)
