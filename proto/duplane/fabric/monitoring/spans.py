"""Spans: their names and attributes, and their context inside messages.

Each unit is a trace of its own, linked to its session's span. The stages of a chat turn are child
spans of the turn. Spans are exported, as OTLP over gRPC, only if the standard `OTEL_*` settings
ask for it. Attributes never contain audio, text or keys.
"""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Link, Span, SpanContext
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from duplane.fabric.monitoring.otlp import check_exporter, is_export_configured, resource
from duplane.fabric.v1.trace_pb2 import TraceContext

EDGE_SESSION = "edge.session"
EDGE_QUEUE = "edge.queue"  # the wait for a slot, from the first `queued` to the grant
EDGE_UNIT = "edge.unit"
SCHEDULER_QUEUE = "scheduler.queue"  # from the request for a slot to its grant
WORKER_SESSION = "worker.session"
WORKER_UNIT = "worker.unit"
WORKER_CHAT = "worker.chat"
WORKER_CHAT_PREPARE = "worker.chat.prepare"  # work before the device: checks, videos, layout
WORKER_CHAT_PREFILL = "worker.chat.prefill"
WORKER_CHAT_PIECE = "worker.chat.piece"

SESSION_ID = "session.id"
LEASE_ID = "duplane.lease.id"
DIALECT = "duplane.dialect"
SESSION_KIND = "duplane.session.kind"
SLOT = "duplane.slot"
UNIT_SEQUENCE = "duplane.unit.sequence"
UNIT_OUTCOME = "duplane.unit.outcome"
UNIT_DROPPED_COUNT = "duplane.unit.dropped_count"
STAGE_PREFIX = "duplane.stage."  # + stage + "_ms"
BATCH_SIZE = "duplane.batch.size"
CHAT_FINISH = "duplane.chat.finish"
CHAT_SEQUENCE = "duplane.chat.sequence"
PROMPT_TOKEN_COUNT = "duplane.prompt.token_count"  # the name of an attribute, not a secret
CONTEXT_TOKEN_COUNT = "duplane.context.token_count"  # the name of an attribute, not a secret
ERROR_TYPE = "error.type"

_propagator = TraceContextTextMapPropagator()


class Telemetry:
    """The tracer of one process. It does nothing when spans are not exported.

    Raises StartError when the settings ask for an exporter that is not installed.
    """

    def __init__(self, role: str, provider: TracerProvider | None = None) -> None:
        if provider is None and is_export_configured("TRACES"):
            check_exporter("TRACES")
            provider = TracerProvider(resource=resource(role))
            provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self.is_exported = provider is not None
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
        """Start a span: a child of `parent`, or the root of a new trace if there is no parent."""
        linked = extract(link)
        return self._tracer.start_span(
            name,
            context=trace.set_span_in_context(trace.NonRecordingSpan(extract(parent))),
            links=[Link(linked)] if linked.is_valid else None,
            start_time=start_time_ns,
            attributes=dict(attributes) if attributes else None,
        )

    def shutdown(self) -> None:
        """Export the remaining spans, within the exporter's time limit."""
        if self._provider:
            self._provider.shutdown()


def inject(span: Span) -> TraceContext | None:
    """Return a span's context for a message; None if the span is not recorded."""
    if not span.get_span_context().is_valid:
        return None
    carrier: dict[str, str] = {}
    _propagator.inject(carrier, trace.set_span_in_context(span))
    return TraceContext(**carrier)


def extract(context: TraceContext | None) -> SpanContext:
    """Return the span context of a message, or OpenTelemetry's invalid context if it has none."""
    if context is None or not context.traceparent:
        return trace.INVALID_SPAN_CONTEXT
    carrier = {"traceparent": context.traceparent, "tracestate": context.tracestate}
    return trace.get_current_span(_propagator.extract(carrier)).get_span_context()
