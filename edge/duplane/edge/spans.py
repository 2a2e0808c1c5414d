"""The edge's spans: one for the session, and one trace of its own for every unit."""

from __future__ import annotations

from opentelemetry.trace import Span, StatusCode

from duplane.fabric.monitoring import spans
from duplane.fabric.monitoring.spans import Telemetry
from duplane.fabric.v1 import session_pb2, trace_pb2


class SessionSpans:
    """The spans of one session. Call `sent` and `answered` only if `are_exported`."""

    def __init__(self, tracer: Telemetry, session_id: str) -> None:
        self._telemetry = tracer
        self._attributes = {spans.SESSION_ID: session_id}
        self._session = tracer.start(spans.EDGE_SESSION, attributes=self._attributes)
        self._units: dict[int, Span] = {}  # of unanswered units, by sequence
        self._queue: Span | None = None
        self.context: trace_pb2.TraceContext | None = spans.inject(self._session)
        self.are_exported = self.context is not None

    def queued(self) -> None:
        """Start the span of the wait for a slot, at the first queue message."""
        if self._queue is None and self.context is not None:
            self._queue = self._telemetry.start(
                spans.EDGE_QUEUE, parent=self.context, attributes=self._attributes
            )

    def granted(self, lease_id: str) -> None:
        """Add the lease id to the session's span, and end the span of the wait."""
        self._end_queue()
        self._session.set_attribute(spans.LEASE_ID, lease_id)

    def sent(self, unit: session_pb2.Unit) -> None:
        """Start the span of a unit at its receive time, and add the span's context to the unit."""
        received = unit.receive_time
        span = self._telemetry.start(
            spans.EDGE_UNIT,
            link=self.context,
            start_time_ns=received.seconds * 1_000_000_000 + received.nanos,
            attributes={**self._attributes, spans.UNIT_SEQUENCE: unit.sequence},
        )
        self._units[unit.sequence] = span
        if (context := spans.inject(span)) is not None:
            unit.trace.CopyFrom(context)

    def answered(self, response: session_pb2.ConverseResponse) -> None:
        """End the span of the unit that `response` answers; older units were dropped."""
        match response.WhichOneof("message"):
            case "delta":
                answer = response.delta
                outcome = answer.WhichOneof("outcome") or ""
            case "failed":
                answer, outcome = response.failed, "failed"
            case _:
                return
        while self._units and (oldest := next(iter(self._units))) <= answer.sequence:
            span = self._units.pop(oldest)
            is_this = oldest == answer.sequence
            span.set_attribute(spans.UNIT_OUTCOME, outcome if is_this else "dropped")
            if is_this:
                dropped_count = response.delta.dropped_unit_count  # 0 if the unit failed
                span.set_attribute(spans.UNIT_DROPPED_COUNT, dropped_count)
            span.end()

    def _end_queue(self) -> None:
        if self._queue is not None:
            self._queue.end()
            self._queue = None

    def end(self, dialect: str, outcome: str, *, is_failure: bool) -> None:
        """End the session's span and the spans that are still open below it."""
        self._end_queue()
        for span in self._units.values():
            span.set_attribute(spans.UNIT_OUTCOME, "unanswered")
            span.end()
        self._units.clear()
        self._session.set_attribute(spans.DIALECT, dialect)
        if is_failure:
            self._session.set_attribute(spans.ERROR_TYPE, outcome)
            self._session.set_status(StatusCode.ERROR, outcome)
        self._session.end()
