"""Spans: their names, their attributes, and how context travels inside messages.

Each unit is a trace of its own, linked to its session's span; what a turn of chat goes through are
spans below the turn's. Exported by the standard `OTEL_*` settings, as OTLP over gRPC, and not at
all when those are unset. No audio, text or keys in attributes, ever.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Link, Span, SpanContext
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from duplane.fabric.process import StartError
from duplane.fabric.v1.trace_pb2 import TraceContext

EDGE_SESSION = "edge.session"
EDGE_UNIT = "edge.unit"
WORKER_SESSION = "worker.session"
WORKER_UNIT = "worker.unit"
WORKER_CHAT = "worker.chat"
WORKER_CHAT_PREPARE = "worker.chat.prepare"  # checks, videos, layout: before the device
WORKER_CHAT_PREFILL = "worker.chat.prefill"
WORKER_CHAT_PIECE = "worker.chat.piece"

SESSION_ID = "session.id"
LEASE_ID = "duplane.lease.id"
DIALECT = "duplane.dialect"
SLOT = "duplane.slot"
UNIT_SEQUENCE = "duplane.unit.sequence"
UNIT_OUTCOME = "duplane.unit.outcome"
UNIT_DROPPED_COUNT = "duplane.unit.dropped_count"
STAGE_PREFIX = "duplane.stage."  # + stage + "_ms"
BATCH_SIZE = "duplane.batch.size"
CHAT_FINISH = "duplane.chat.finish"
CHAT_SEQUENCE = "duplane.chat.sequence"
PROMPT_TOKEN_COUNT = "duplane.prompt.token_count"  # a name, not a secret
CONTEXT_TOKEN_COUNT = "duplane.context.token_count"  # a name, not a secret
ERROR_TYPE = "error.type"

_EXPORT_SETTINGS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_propagator = TraceContextTextMapPropagator()


def _check_exporter(environ: Mapping[str, str]) -> None:
    """Refuse what we do not bring: the only exporter here is OTLP over gRPC."""
    for name, allowed in (
        ("OTEL_TRACES_EXPORTER", ("", "otlp")),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", ("", "grpc")),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", ("", "grpc")),
    ):
        value = environ.get(name, "")
        if value not in allowed:
            raise StartError(f"{name} is {value!r}, must be {allowed[-1]!r}")


def is_export_configured(environ: Mapping[str, str] = os.environ) -> bool:
    """Tell whether the standard settings ask for spans to be exported."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    exporter = environ.get("OTEL_TRACES_EXPORTER", "")
    if exporter:
        return exporter != "none"
    return any(environ.get(name) for name in _EXPORT_SETTINGS)


class Telemetry:
    """One process's tracer. Free of cost when nothing is exported.

    Raises StartError when the settings ask for an exporter that is not there.
    """

    def __init__(self, role: str, provider: TracerProvider | None = None) -> None:
        if provider is None and is_export_configured():
            _check_exporter(os.environ)
            provider = TracerProvider(resource=_resource(role))
            provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._provider = provider
        self._tracer = provider.get_tracer("duplane") if provider else trace.NoOpTracer()

    def start(
        self,
        name: str,
        *,
        parent: TraceContext | None = None,
        link: TraceContext | None = None,
        start_time_ns: int | None = None,
        attributes: Mapping[str, AttributeValue] | None = None,
    ) -> Span:
        """Start a span: a child of `parent` if it is given, else the root of a new trace."""
        linked = extract(link)
        return self._tracer.start_span(
            name,
            context=trace.set_span_in_context(trace.NonRecordingSpan(extract(parent))),
            links=[Link(linked)] if linked.is_valid else None,
            start_time=start_time_ns,
            attributes=dict(attributes) if attributes else None,
        )

    def shutdown(self) -> None:
        """Export what is left, within the exporter's own time limit."""
        if self._provider:
            self._provider.shutdown()


def _resource(role: str) -> Resource:
    named = os.environ.get("OTEL_SERVICE_NAME")
    return Resource.create({} if named else {SERVICE_NAME: f"duplane-{role}"})


def inject(span: Span) -> TraceContext | None:
    """Return a span's context for a message, or None when it is not traced."""
    if not span.get_span_context().is_valid:
        return None
    carrier: dict[str, str] = {}
    _propagator.inject(carrier, trace.set_span_in_context(span))
    return TraceContext(**carrier)


def extract(context: TraceContext | None) -> SpanContext:
    """Return the span context a message carries; the invalid one when it carries none."""
    if context is None or not context.traceparent:
        return trace.INVALID_SPAN_CONTEXT
    carrier = {"traceparent": context.traceparent, "tracestate": context.tracestate}
    return trace.get_current_span(_propagator.extract(carrier)).get_span_context()
