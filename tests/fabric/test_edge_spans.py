"""Every unit is a trace of its own, linked to its session's span, its context inside the unit."""

from __future__ import annotations

from live_edge import APPEND, begin, closed, end, exchange, live_edge, send
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from duplane.fabric import telemetry
from duplane.fabric.telemetry import Telemetry
from duplane.fabric.v1 import session_pb2


class Spans:
    def __init__(self) -> None:
        provider = TracerProvider()
        self._exporter = InMemorySpanExporter()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.telemetry = Telemetry("edge", provider)

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.name == name]


async def test_every_unit_is_a_root_span_linked_to_the_session() -> None:
    spans = Spans()
    received: list[session_pb2.Unit] = []
    async with live_edge(telemetry=spans.telemetry) as edge, edge.connect() as client:
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
        (session,) = spans.named(telemetry.EDGE_SESSION)
        units = spans.named(telemetry.EDGE_UNIT)
        assert session.context
        assert session.attributes
        assert session.attributes[telemetry.DIALECT] == "A"
        assert len({unit.context.trace_id for unit in units if unit.context}) == 3
        for span, unit in zip(units, received, strict=True):
            assert span.parent is None
            assert [link.context.span_id for link in span.links] == [session.context.span_id]
            assert span.context
            assert telemetry.extract(unit.trace).span_id == span.context.span_id
            assert span.start_time == unit.receive_time.ToNanoseconds()
            assert span.attributes
            assert span.attributes[telemetry.UNIT_OUTCOME] == "listen"
            assert span.attributes[telemetry.SESSION_ID] == session.attributes[telemetry.SESSION_ID]


async def test_units_that_nobody_answers_end_with_their_session() -> None:
    spans = Spans()
    async with live_edge(telemetry=spans.telemetry) as edge, edge.connect() as client:
        edge.fabric.on_unit = lambda unit: []
        await begin(client)
        conversation = await edge.fabric.conversation()
        await send(client, APPEND)
        while (await conversation.next_request()).WhichOneof("message") != "unit":
            pass
        await edge.fabric.worker_server.stop(0)
        await closed(client, 1011)
        await edge.settled()
    (unit,) = spans.named(telemetry.EDGE_UNIT)
    (session,) = spans.named(telemetry.EDGE_SESSION)
    assert unit.attributes
    assert session.attributes
    assert unit.attributes[telemetry.UNIT_OUTCOME] == "unanswered"
    assert session.attributes[telemetry.ERROR_TYPE] == "failed"
