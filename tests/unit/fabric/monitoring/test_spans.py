"""Spans: messages carry the context, so that parents and links are right; no export by default."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from duplane.fabric.monitoring import spans
from duplane.fabric.monitoring.spans import Telemetry
from duplane.fabric.process import StartError


def recording() -> tuple[Telemetry, InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    return Telemetry("test", SimpleSpanProcessor(exporter)), exporter


def test_unit_is_a_trace_of_its_own_with_a_link_to_its_session() -> None:
    tracer, exporter = recording()
    session = tracer.start(spans.EDGE_SESSION)
    unit = tracer.start(spans.EDGE_UNIT, link=spans.inject(session))
    step = tracer.start(spans.WORKER_UNIT, parent=spans.inject(unit))
    for span in (step, unit, session):
        span.end()
    exported = {span.name: span for span in exporter.get_finished_spans()}
    of_unit, of_step = exported[spans.EDGE_UNIT], exported[spans.WORKER_UNIT]
    assert of_unit.context
    assert of_step.context
    assert of_unit.parent is None
    session_trace = session.get_span_context().trace_id
    assert of_unit.context.trace_id != session_trace
    assert of_unit.links[0].context.trace_id == session_trace
    assert of_step.parent
    assert of_step.parent.span_id == of_unit.context.span_id
    assert of_step.context.trace_id == of_unit.context.trace_id


def test_untraced_span_has_no_context_to_send() -> None:
    assert spans.inject(Telemetry("test").start(spans.EDGE_UNIT)) is None
    assert not spans.extract(None).is_valid


@pytest.mark.parametrize(
    ("setting", "value"),
    [("OTEL_TRACES_EXPORTER", "console"), ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")],
)
def test_exporter_that_is_not_there_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, setting: str, value: str
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4317")
    monkeypatch.setenv(setting, value)
    with pytest.raises(StartError, match=setting):
        Telemetry("test")
