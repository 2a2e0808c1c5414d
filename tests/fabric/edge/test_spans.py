"""Every unit starts a trace of its own, which links to the session's span."""

from __future__ import annotations

import asyncio

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import Sampler
from opentelemetry.trace import StatusCode
from support.edge.live_edge import APPEND, begin, closed, end, exchange, live_edge, receive, send

from duplane.fabric.converse import ConverseStream
from duplane.fabric.monitoring import spans
from duplane.fabric.monitoring.spans import Telemetry
from duplane.fabric.v1 import lease_pb2, session_pb2


class Spans:
    def __init__(self, sampler: Sampler | None = None) -> None:
        self._exporter = InMemorySpanExporter()
        self.telemetry = Telemetry("edge", SimpleSpanProcessor(self._exporter), sampler)

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.name == name]


async def test_every_unit_is_a_root_span_linked_to_the_session() -> None:
    exported = Spans()
    received: list[session_pb2.Unit] = []
    async with live_edge(telemetry=exported.telemetry) as edge, edge.connect() as client:
        answer = edge.fabric.on_unit

        def on_unit(unit: session_pb2.Unit) -> list[session_pb2.ConverseResponse]:
            received.append(unit)
            return list(answer(unit))

        edge.fabric.on_unit = on_unit
        await begin(client)
        for _ in range(3):
            await exchange(client)
        await end(client)
        await edge.settled()
        (session,) = exported.named(spans.EDGE_SESSION)
        units = exported.named(spans.EDGE_UNIT)
        assert session.context
        assert session.attributes
        assert session.attributes[spans.DIALECT] == "A"
        assert len({unit.context.trace_id for unit in units if unit.context}) == 3
        for span, unit in zip(units, received, strict=True):
            assert span.parent is None
            assert [link.context.span_id for link in span.links] == [session.context.span_id]
            assert span.context
            assert spans.extract(unit.trace).span_id == span.context.span_id
            assert span.start_time == unit.receive_time.ToNanoseconds()
            assert span.attributes
            assert span.attributes[spans.UNIT_OUTCOME] == "listen"
            assert span.attributes[spans.SESSION_ID] == session.attributes[spans.SESSION_ID]


async def test_lost_worker_fails_the_session_span_and_is_logged_with_its_cause(
    caplog: pytest.LogCaptureFixture,
) -> None:
    exported = Spans()
    async with live_edge(telemetry=exported.telemetry) as edge, edge.connect() as client:
        edge.fabric.on_unit = lambda unit: []
        await begin(client)
        conversation = await edge.fabric.conversation()
        await send(client, APPEND)
        while (await conversation.next_request()).WhichOneof("message") != "unit":
            pass
        await edge.fabric.worker_server.stop(0)
        await closed(client, 1011)
        await edge.settled()
    (unit,) = exported.named(spans.EDGE_UNIT)
    (session,) = exported.named(spans.EDGE_SESSION)
    assert unit.attributes
    assert session.attributes
    assert unit.attributes[spans.UNIT_OUTCOME] == "unanswered"
    assert session.attributes[spans.ERROR_TYPE] == "failed"
    assert session.status.status_code is StatusCode.ERROR
    (record,) = [record for record in caplog.records if "ended after" in record.message]
    assert record.levelname == "ERROR"
    assert "of 127.0.0.1 on worker w ended" in record.message
    assert "failed (the worker was lost)" in record.message


async def test_wait_in_the_queue_is_a_span_below_the_session() -> None:
    exported = Spans()
    async with live_edge(telemetry=exported.telemetry) as edge:
        edge.fabric.is_automatic = False
        async with edge.connect() as client:
            acquisition = await edge.fabric.acquisition()
            acquisition.queued(lease_pb2.Queued(ticket_id="t", position=1, queue_length=1))
            assert (await receive(client))["type"] == "session.queued"
            edge.fabric.is_automatic = True
            acquisition.grant()
            await begin(client)
            await end(client)
        await edge.settled()
    (wait,) = exported.named(spans.EDGE_QUEUE)
    assert wait.parent
    sessions = [session.context for session in exported.named(spans.EDGE_SESSION)]
    assert wait.parent.span_id in {context.span_id for context in sessions if context}


async def test_unit_that_is_answered_before_its_write_returns_has_all_stages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exported = Spans()
    write = ConverseStream.write
    answered = asyncio.Event()

    async def write_late(stream: ConverseStream, request: session_pb2.ConverseRequest) -> None:
        await write(stream, request)
        if request.WhichOneof("message") == "unit":
            await answered.wait()

    monkeypatch.setattr(ConverseStream, "write", write_late)
    async with live_edge(telemetry=exported.telemetry) as edge, edge.connect() as client:
        await begin(client)
        await exchange(client)
        answered.set()
        await end(client)
        await edge.settled()
    (unit,) = exported.named(spans.EDGE_UNIT)
    assert [event.name for event in unit.events] == list(spans.EDGE_STAGES)
