"""The edge's spans of one session: one for the session, and a trace of its own for every unit."""

from __future__ import annotations

from opentelemetry.trace import Span

from duplane.fabric import telemetry
from duplane.fabric.telemetry import Telemetry
from duplane.fabric.v1 import session_pb2, trace_pb2


class SessionSpans:
    """Costs nothing but a comparison per unit when nothing is exported."""

    def __init__(self, tracer: Telemetry, session_id: str) -> None:
        self._telemetry = tracer
        self._attributes = {telemetry.SESSION_ID: session_id}
        self._session = tracer.start(telemetry.EDGE_SESSION, attributes=self._attributes)
        self._units: dict[int, Span] = {}  # sent and not answered
        self.context: trace_pb2.TraceContext | None = telemetry.inject(self._session)

    def granted(self, lease_id: str) -> None:
        """Name the lease the session runs on."""
        self._session.set_attribute(telemetry.LEASE_ID, lease_id)

    def sent(self, unit: session_pb2.Unit) -> None:
        """Start the span of a unit, from when it was received, and put its context inside."""
        if self.context is None:
            return  # nothing is exported
        received = unit.receive_time
        span = self._telemetry.start(
            telemetry.EDGE_UNIT,
            link=self.context,
            start_time_ns=received.seconds * 1_000_000_000 + received.nanos,
            attributes={**self._attributes, telemetry.UNIT_SEQUENCE: unit.sequence},
        )
        self._units[unit.sequence] = span
        if (context := telemetry.inject(span)) is not None:
            unit.trace.CopyFrom(context)

    def answered(self, response: session_pb2.ConverseResponse) -> None:
        """End the span of the unit that `response` answers; those before it were dropped."""
        match response.WhichOneof("message"):
            case "delta":
                outcome = response.delta.WhichOneof("outcome") or ""
                self._end(response.delta.sequence, outcome, response.delta.dropped_unit_count)
            case "failed":
                self._end(response.failed.sequence, "failed", 0)
            case _:
                return

    def _end(self, sequence: int, outcome: str, dropped_count: int) -> None:
        while self._units and (oldest := next(iter(self._units))) <= sequence:
            span = self._units.pop(oldest)
            is_this = oldest == sequence
            span.set_attribute(telemetry.UNIT_OUTCOME, outcome if is_this else "dropped")
            if is_this:
                span.set_attribute(telemetry.UNIT_DROPPED_COUNT, dropped_count)
            span.end()

    def end(self, dialect: str, outcome: str, *, is_failure: bool) -> None:
        """End the session's span, and those of units that nobody will answer any more."""
        for span in self._units.values():
            span.set_attribute(telemetry.UNIT_OUTCOME, "unanswered")
            span.end()
        self._units.clear()
        self._session.set_attribute(telemetry.DIALECT, dialect)
        if is_failure:
            self._session.set_attribute(telemetry.ERROR_TYPE, outcome)
        self._session.end()
