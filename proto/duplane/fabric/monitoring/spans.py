"""Spans: their names, stages and attributes, and their context inside messages.

A session has a span, with child spans for its queue, claim, opening and close. Each unit is a trace
of its own, linked to the session's span: the span `edge.unit` with the child `worker.unit`. Each
event of these two spans begins a stage, which lasts until the next event or the end of the span.
The stage `worker` of `edge.unit` contains the worker's span and the time in the network. The parts
of a chat turn are child spans of the turn's span.

The standard settings of OpenTelemetry choose the sessions of which all units are exported. Of the
other sessions, only units that are late, fail or are dropped are exported. A unit is late if its
delta is made longer after the edge received the unit than the unit lasts. The worker decides this
and sends the result in the `sampled` flag of the delta's trace context. If a unit becomes late only
on the way back, the edge exports its own span, with the worker's stage times as attributes; the
worker's span is not exported.

Spans are exported, as OTLP over gRPC, only if the standard `OTEL_*` settings ask for it. Attributes
never contain audio, text or keys.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from opentelemetry import trace
from opentelemetry.sdk.trace import Event, ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import Sampler
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, Span, SpanContext, Status, StatusCode, TraceFlags
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue
from prometheus_client import CollectorRegistry

from duplane.fabric.monitoring.otlp import check_exporter, is_export_configured, resource
from duplane.fabric.monitoring.span_queue import SpanQueue, observe_spans
from duplane.fabric.v1.session_pb2 import Delta
from duplane.fabric.v1.trace_pb2 import TraceContext

EDGE_SESSION = "edge.session"
EDGE_QUEUE = "edge.queue"  # the wait for a slot, from the first `queued` to the grant
EDGE_CLAIM = "edge.claim"  # from the grant to the worker's `claimed`
EDGE_OPEN = "edge.open"  # from the settings to the worker's `opened`
EDGE_MOVE = "edge.move"  # from the loss of a worker until the next one continues the conversation
EDGE_CLOSE = "edge.close"  # from the end of the session until its connections are closed
EDGE_UNIT = "edge.unit"
SCHEDULER_QUEUE = "scheduler.queue"  # from the request for a slot to its grant
WORKER_SESSION = "worker.session"
WORKER_OPEN = "worker.open"  # from `open` to `opened`
WORKER_CLEANUP = "worker.cleanup"  # from the end of the session until its slot is free
WORKER_UNIT = "worker.unit"
WORKER_CHAT = "worker.chat"
WORKER_CHAT_PREPARE = "worker.chat.prepare"  # work before the device: checks, videos, layout
WORKER_CHAT_PREFILL = "worker.chat.prefill"
WORKER_CHAT_PIECE = "worker.chat.piece"

# Stages of `edge.unit`, in their order.
READ = "read"  # a received message waits until its session takes it
PARSE = "parse"
QUEUE = "queue"  # the unit waits for the stream to the worker
SEND = "send"  # the stream takes the unit
WORKER = "worker"  # the network and the worker
RENDER = "render"
WRITE = "write"  # the client's connection takes the events
EDGE_STAGES = (READ, PARSE, QUEUE, SEND, WORKER, RENDER, WRITE)
# Between SEND and WORKER, if the session has moved: from the write to the worker that it has left
# to the write to the next worker.
MOVE = "move"

# Stages of `worker.unit`. All waits come first, then the times of the model; in the worker they
# alternate. From vision to vocoder, a stage has the whole time of the launches for several units.
PREPARE = "prepare"  # check of the unit and decoding of its pictures
INBOX = "inbox"  # wait for earlier units of the conversation
SETTLE = "settle"  # wait for the settle of the conversation's previous unit
DEVICE = "device"  # wait while the device runs other work, also between launches of the unit
MODEL_STAGES = ("vision", "audio", "prefill", "decode", "talker", "vocoder")
RUN = "run"  # the rest of the launches' time, for which the model reports no stage
DELIVER = "deliver"  # from the device thread to the stream
WORKER_STAGES = (PREPARE, INBOX, SETTLE, DEVICE, *MODEL_STAGES, RUN, DELIVER)

SESSION_ID = "session.id"
LEASE_ID = "duplane.lease.id"
DIALECT = "duplane.dialect"
SESSION_KIND = "duplane.session.kind"
SLOT = "duplane.slot"
UNIT_SEQUENCE = "duplane.unit.sequence"
UNIT_OUTCOME = "duplane.unit.outcome"
UNIT_IS_LATE = "duplane.unit.is_late"
UNIT_IS_FORCED = "duplane.unit.is_forced"  # the unit had to listen
UNIT_IS_INTERRUPTION = "duplane.unit.is_interruption"  # the model listened amid its turn
# How likely the first draw of the unit was to listen; absent if nothing was drawn.
UNIT_LISTEN_PROBABILITY = "duplane.unit.listen_probability"
UNIT_IS_REQUESTED = "duplane.unit.is_requested"  # the model spoke a text that a caller requested
UNIT_DROPPED_COUNT = "duplane.unit.dropped_count"
STAGE_PREFIX = "duplane.stage."  # + stage + "_ms"
MOVE_CAUSE = "duplane.move.cause"
MOVE_NUMBER = "duplane.move.number"
MOVE_OUTCOME = "duplane.move.outcome"  # moved, failed or stayed
MOVE_FROM = "duplane.move.from"  # id of the worker that the session has left
MOVE_TO = "duplane.move.to"  # id of the worker at which it continues
MOVE_SILENT_MS = "duplane.move.silent_ms"  # time in which no worker got units
MOVE_REBUILD_MS = "duplane.move.rebuild_ms"  # from the settings to the last past unit
CANNOT_MOVE = "duplane.cannot_move"  # why the session can no longer move
BATCH_SIZE = "duplane.batch.size"
CHAT_FINISH = "duplane.chat.finish"
CHAT_SEQUENCE = "duplane.chat.sequence"
PROMPT_TOKEN_COUNT = "duplane.prompt.token_count"  # the name of an attribute, not a secret
CONTEXT_TOKEN_COUNT = "duplane.context.token_count"  # the name of an attribute, not a secret
INPUT_TOKEN_COUNT = "gen_ai.usage.input_tokens"  # the name of an attribute, not a secret
OUTPUT_TOKEN_COUNT = "gen_ai.usage.output_tokens"  # the name of an attribute, not a secret
SPEECH_TOKEN_COUNT = "duplane.speech.token_count"  # the name of an attribute, not a secret
ERROR_TYPE = "error.type"

DROPPED, FAILED, UNANSWERED = "dropped", "failed", "unanswered"  # outcomes without a delta

_propagator = TraceContextTextMapPropagator()
_ERROR = Status(StatusCode.ERROR)
_UNSET = Status(StatusCode.UNSET)
_SAMPLED, _NOT_SAMPLED = TraceFlags(TraceFlags.SAMPLED), TraceFlags(TraceFlags.DEFAULT)
_SCOPE = InstrumentationScope("duplane")


class SpanIds(NamedTuple):
    """The ids of a span that is recorded later, or never."""

    trace_id: int
    span_id: int

    @classmethod
    def new(cls, trace_id: int = 0) -> SpanIds:
        """Return the ids of a new span, which begins a new trace if `trace_id` is 0."""
        return cls(trace_id or random.getrandbits(128) or 1, random.getrandbits(64) or 1)

    @classmethod
    def of(cls, span: Span) -> SpanIds:
        """Return the ids of a span."""
        context = span.get_span_context()
        return cls(context.trace_id, context.span_id)

    def traceparent(self, *, is_sampled: bool) -> str:
        """Return the ids as the `traceparent` of a message."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{'01' if is_sampled else '00'}"


@dataclass(slots=True)
class FinishedSpan:
    """A span that has ended and can be recorded. Times are wall-clock nanoseconds.

    `stages` has the name and the beginning of each stage, in order. `token_counts` has further
    attributes of stages, by the name of the stage.
    """

    name: str
    ids: SpanIds
    start_ns: int
    end_ns: int
    attributes: dict[str, AttributeValue]
    parent: SpanContext | None = None
    links: Sequence[Link] = ()
    stages: Iterable[tuple[str, int]] = ()
    token_counts: Mapping[str, Mapping[str, int]] = field(
        default_factory=dict[str, Mapping[str, int]]
    )
    is_error: bool = False


class Telemetry:
    """The tracer of one process. Its methods do nothing if spans are not exported.

    The constructor raises StartError if the settings ask for an exporter that is not installed.
    """

    def __init__(
        self, role: str, processor: SpanProcessor | None = None, sampler: Sampler | None = None
    ) -> None:
        """Export spans as the `OTEL_*` settings ask. Tests pass a `processor` instead."""
        self._role = role
        self._queue: SpanQueue | None = None
        if processor is None and is_export_configured():
            check_exporter()
            # Imported only here: most processes export nothing, and the import would slow their
            # start.
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

            processor = self._queue = SpanQueue(OTLPSpanExporter())
        self.is_exported = processor is not None
        self._processor = processor
        self._resource = resource(role)
        self._provider: TracerProvider | None = None
        self._tracer: trace.Tracer = trace.NoOpTracer()
        if processor is not None:
            self._provider = TracerProvider(sampler, self._resource)
            self._provider.add_span_processor(processor)
            self._tracer = self._provider.get_tracer(_SCOPE.name)

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

    def record(self, span: FinishedSpan) -> None:
        """Export a span that has ended, even if its session is not sampled.

        The span of a unit is made at the unit's end, because only then it is clear whether the span
        is exported. This method takes a third of the time of `start` and `end`.
        """
        if self._processor is None:
            return
        counts = span.token_counts
        self._processor.on_end(
            ReadableSpan(
                span.name,
                span_context(span.ids),
                span.parent,
                self._resource,
                span.attributes,
                [Event(name, counts.get(name), start_ns) for name, start_ns in span.stages],
                span.links,
                status=_ERROR if span.is_error else _UNSET,
                start_time=span.start_ns,
                end_time=span.end_ns,
                instrumentation_scope=_SCOPE,
            )
        )

    def observe(self, registry: CollectorRegistry) -> None:
        """Add the counts of exported and lost spans to the metrics."""
        observe_spans(registry, self._role, self._queue)

    def shutdown(self) -> None:
        """Export the remaining spans, within the exporter's time limit."""
        if self._provider:
            self._provider.shutdown()


def decision_attributes(delta: Delta) -> dict[str, AttributeValue]:
    """Return what tells why the model listened or spoke in a unit."""
    attributes: dict[str, AttributeValue] = {}
    if delta.listen.is_forced:
        attributes[UNIT_IS_FORCED] = True
    if delta.interrupted_turn:
        attributes[UNIT_IS_INTERRUPTION] = True
    if delta.HasField("listen_probability"):
        attributes[UNIT_LISTEN_PROBABILITY] = round(delta.listen_probability, 6)
    if delta.HasField("speech_request"):
        attributes[UNIT_IS_REQUESTED] = True
    return attributes


def span_context(ids: SpanIds) -> SpanContext:
    """Return the context of an exported span from its ids."""
    return SpanContext(ids.trace_id, ids.span_id, is_remote=False, trace_flags=_SAMPLED)


def link_to(context: TraceContext | None) -> tuple[Link, ...]:
    """Return a link to the span in a message's trace context, or no link without a context."""
    linked = extract(context)
    return (Link(linked),) if linked.is_valid else ()


def is_sampled(context: TraceContext | None) -> bool:
    """True if the sender of this trace context exports its span."""
    return context is not None and context.traceparent[-1:] in _ODD


_ODD = frozenset("13579bdf")  # last digits of flags whose lowest bit, `sampled`, is set


def inject(span: Span) -> TraceContext | None:
    """Return a span's trace context for a message, or None if the span is not recorded."""
    if not span.get_span_context().is_valid:
        return None
    carrier: dict[str, str] = {}
    _propagator.inject(carrier, trace.set_span_in_context(span))
    return TraceContext(**carrier)


def extract(context: TraceContext | None) -> SpanContext:
    """Return a message's span context, or OpenTelemetry's invalid context if it has none."""
    if context is None or not context.traceparent:
        return trace.INVALID_SPAN_CONTEXT
    carrier = {"traceparent": context.traceparent, "tracestate": context.tracestate}
    return trace.get_current_span(_propagator.extract(carrier)).get_span_context()


def from_headers(headers: Mapping[str, str]) -> TraceContext:
    """Return the trace context in HTTP headers (lower-case names), or an empty one if invalid."""
    context = TraceContext(
        traceparent=headers.get("traceparent", ""), tracestate=headers.get("tracestate", "")
    )
    return context if extract(context).is_valid else TraceContext()


def from_metadata(metadata: Iterable[tuple[str, str | bytes]]) -> TraceContext:
    """Return the trace context in the metadata of a gRPC call, or an empty one if it is invalid."""
    return from_headers({key: value for key, value in metadata if isinstance(value, str)})
