"""The edge's spans: one for each session, one for each step of a session, one for each unit."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from opentelemetry.trace import Span, StatusCode
from opentelemetry.util.types import AttributeValue

from duplane.edge.clock import Clock
from duplane.edge.session.effects import EndMove
from duplane.edge.session.move_table import MoveOutcome
from duplane.edge.session.receipt import Receipt
from duplane.fabric.durations import to_seconds
from duplane.fabric.model import DEFAULT_FORMAT, ModelFormat
from duplane.fabric.monitoring import spans
from duplane.fabric.monitoring.spans import FinishedSpan, SpanIds, Telemetry
from duplane.fabric.v1 import session_pb2, trace_pb2

_MAX_UNITS = 1024  # maximum number of unanswered units; of more, the oldest are not traced
# Of a session that is not sampled, at most this many steps are kept: the newest.
_MAX_STEPS = 64


@dataclass(slots=True, eq=False)
class _Unit:
    """One unit in progress. Times are in wall-clock nanoseconds, and 0 until they are known."""

    sequence: int
    ids: SpanIds
    receipt: Receipt
    taken_ns: int
    sent_ns: int = 0
    sent_again_ns: int = 0  # to the next worker
    answered_ns: int = 0
    rendered_ns: int = 0
    outcome: str = spans.UNANSWERED
    is_kept: bool = False  # exported even if it is not sampled
    dropped_count: int = 0  # units that were dropped before it
    decision: dict[str, AttributeValue] | None = None  # why the model listened or spoke
    # The worker's stage times, if the worker did not export its own span.
    stage_times: session_pb2.StageTimes | None = None

    def stages(self) -> list[tuple[str, int]]:
        """Return the stages that have begun, with the times of their beginnings."""
        begun = [
            (spans.READ, self.receipt.received_ns),
            (spans.PARSE, self.receipt.read_ns),
            (spans.QUEUE, self.receipt.parsed_ns),
            (spans.SEND, self.taken_ns),
            (spans.MOVE, self.sent_ns if self.sent_again_ns else 0),
            (spans.WORKER, self.sent_again_ns or self.sent_ns),
            (spans.RENDER, self.answered_ns),
            (spans.WRITE, self.rendered_ns),
        ]
        return [stage for stage in begun if stage[1]]


class _Move(NamedTuple):
    """A move while which units waited, in wall-clock nanoseconds, and its attributes."""

    begin_ns: int
    end_ns: int
    attributes: dict[str, AttributeValue]


class SessionSpans:
    """The spans of one session. `are_exported` tells whether units need spans.

    `parent` is the client's trace; the session becomes a part of this trace. If the session is not
    sampled but fails, its span and those of its steps are exported at its end.
    """

    def __init__(
        self,
        telemetry: Telemetry,
        session_id: str,
        clock: Clock,
        parent: trace_pb2.TraceContext | None = None,
    ) -> None:
        self._telemetry = telemetry
        self._clock = clock
        self._parent = parent
        self._attributes: dict[str, AttributeValue] = {spans.SESSION_ID: session_id}
        self._session = telemetry.start(
            spans.EDGE_SESSION, parent=parent, attributes=self._attributes
        )
        self._step: Span | None = None  # the queue, claim, opening or close that runs now
        self._step_name = ""
        self._move: Span | None = None
        self._last_move: _Move | None = None
        self._units: dict[int, _Unit] = {}  # unanswered units, by sequence
        self._unwritten: dict[int, _Unit] = {}  # answered units whose events are not written yet
        self.context: trace_pb2.TraceContext | None = spans.inject(self._session)
        self.are_exported = telemetry.is_exported
        self._is_sampled = spans.is_sampled(self.context)
        self._links = spans.link_to(self.context)
        self._lease_id = self._next_lease_id = ""
        self._deadline_ns = DEFAULT_FORMAT.unit_ns  # answers that take longer fall behind real time
        self._start_ns = self._step_start_ns = clock.now().wall_ns
        self._unsampled_steps = deque[FinishedSpan](maxlen=_MAX_STEPS)

    # --- the session ---

    def begin(self, step: str) -> None:
        """Start the span of a step of the session, after ending the span of the previous step."""
        if self._step_name == step or self.context is None:
            return
        self.end_step()
        self._step_name = step
        self._step_start_ns = self._clock.now().wall_ns
        self._step = self._telemetry.start(step, parent=self.context, attributes=self._attributes)

    def end_step(self) -> None:
        """End the span of the current step."""
        if self._step is None:
            return
        self._step.end()
        if not self._is_sampled:
            self._unsampled_steps.append(
                FinishedSpan(
                    name=self._step_name,
                    ids=SpanIds.of(self._step),
                    start_ns=self._step_start_ns,
                    end_ns=self._clock.now().wall_ns,
                    attributes=self._attributes,
                    parent=spans.extract(self.context),
                )
            )
        self._step = None
        self._step_name = ""

    def granted(self, lease_id: str) -> None:
        """Begin the claim's span, and add the lease id to the session's span.

        During a move, the lease id is added when the move has ended.
        """
        self.begin(spans.EDGE_CLAIM)
        if self._move:
            self._next_lease_id = lease_id
        else:
            self._use_lease(lease_id)

    def _use_lease(self, lease_id: str) -> None:
        self._lease_id = lease_id
        self._session.set_attribute(spans.LEASE_ID, lease_id)

    def use_model(self, model: ModelFormat) -> None:
        """Judge by the duration of this model's units whether a unit is late."""
        self._deadline_ns = model.unit_ns

    def fixed(self, reason: str) -> None:
        """Record in the session's span why the session can no longer move."""
        self._session.set_attribute(spans.CANNOT_MOVE, reason)

    def begin_move(self, cause: str, number: int) -> None:
        """Begin the span of an attempt to move to another worker.

        `number` counts attempts from 1.
        """
        attributes = {**self._attributes, spans.MOVE_CAUSE: cause, spans.MOVE_NUMBER: number}
        self._move = self._telemetry.start(
            spans.EDGE_MOVE, parent=self.context, attributes=attributes
        )

    def end_move(self, end: EndMove) -> None:
        """End the span of an attempt to move. An attempt that was not needed is no error."""
        if self._move is None:
            return
        attributes: dict[str, AttributeValue] = {
            spans.MOVE_CAUSE: end.cause,
            spans.MOVE_FROM: end.from_worker_id,
            spans.MOVE_TO: end.to_worker_id,
            spans.MOVE_SILENT_MS: end.silent_s * 1e3,
            spans.MOVE_REBUILD_MS: end.rebuild_s * 1e3,
        }
        if end.outcome is MoveOutcome.MOVED:
            self._use_lease(self._next_lease_id)
            now_ns = self._clock.now().wall_ns
            self._last_move = _Move(now_ns - int(end.silent_s * 1e9), now_ns, attributes)
        if end.outcome is MoveOutcome.FAILED:
            self._move.set_status(StatusCode.ERROR)
        self._move.set_attributes({**attributes, spans.MOVE_OUTCOME: end.outcome})
        self._move.end()
        self._move = None

    def end(self, dialect: str, outcome: str, *, is_failure: bool) -> None:
        """End the session's span and the spans that are still open below it."""
        self.end_step()
        now_ns = self._clock.now().wall_ns
        for unit in (*self._unwritten.values(), *self._units.values()):
            unit.is_kept |= is_failure
            self._finish(unit, now_ns)
        self._units.clear()
        self._unwritten.clear()
        self._session.set_attribute(spans.DIALECT, dialect)
        if is_failure:
            self._session.set_attribute(spans.ERROR_TYPE, outcome)
            self._session.set_status(StatusCode.ERROR, outcome)
        self._session.end()
        if is_failure and self.are_exported and not self._is_sampled:
            self._export_unsampled(dialect, outcome, now_ns)

    def _export_unsampled(self, dialect: str, outcome: str, end_ns: int) -> None:
        """Export the spans of a session that has failed and is not sampled."""
        attributes = {
            **self._attributes,
            spans.DIALECT: dialect,
            spans.ERROR_TYPE: outcome,
        }
        if self._lease_id:
            attributes[spans.LEASE_ID] = self._lease_id
        parent = spans.extract(self._parent)
        self._telemetry.record(
            FinishedSpan(
                name=spans.EDGE_SESSION,
                ids=SpanIds.of(self._session),
                start_ns=self._start_ns,
                end_ns=end_ns,
                attributes=attributes,
                parent=parent if parent.is_valid else None,
                is_error=True,
            )
        )
        for step in self._unsampled_steps:
            self._telemetry.record(step)

    # --- the units of the session ---

    def dropped(self, receipt: Receipt) -> None:
        """Record a unit that was dropped before it was sent."""
        now_ns = self._clock.now().wall_ns
        unit = _Unit(-1, SpanIds.new(), receipt, 0, outcome=spans.DROPPED, is_kept=True)
        self._finish(unit, now_ns)

    def sending(self, unit: session_pb2.Unit, receipt: Receipt) -> None:
        """Begin the trace of a unit, and add its context to the unit."""
        ids = SpanIds.new()
        unit.trace.traceparent = ids.traceparent(is_sampled=self._is_sampled)
        now_ns = self._clock.now().wall_ns
        self._units[unit.sequence] = _Unit(unit.sequence, ids, receipt, now_ns)
        if len(self._units) > _MAX_UNITS:
            del self._units[next(iter(self._units))]

    def sent(self, sequence: int) -> None:
        """Record that a unit was written to the stream to the worker, or to the next worker."""
        if unit := self._units.get(sequence):
            now_ns = self._clock.now().wall_ns
            if unit.sent_ns:
                unit.sent_again_ns = now_ns
            else:
                unit.sent_ns = now_ns

    def answered(
        self, answer: session_pb2.Delta | session_pb2.Failed, answered_ns: int
    ) -> Callable[[], None] | None:
        """Record the outcome of a unit that is rendered now. Older units count as dropped.

        Returns the function to call when the events are written to the client's connection.
        """
        unit: _Unit | None = None
        while self._units and (oldest := next(iter(self._units))) <= answer.sequence:
            unit = self._units.pop(oldest)
            if oldest < answer.sequence:
                unit.outcome = spans.DROPPED
                unit.is_kept = True
                self._finish(unit, answered_ns)
        if unit is None or unit.sequence != answer.sequence:
            return None
        unit.answered_ns = answered_ns
        unit.rendered_ns = self._clock.now().wall_ns
        # If the answer came before the write returned, the time of the write is not known yet.
        unit.sent_ns = unit.sent_ns or unit.taken_ns
        if isinstance(answer, session_pb2.Failed):
            unit.outcome = spans.FAILED
            unit.is_kept = True
        else:
            unit.outcome = "speech" if answer.HasField("speech") else "listen"
            unit.is_kept = spans.is_sampled(answer.trace)
            unit.dropped_count = answer.dropped_unit_count
            unit.decision = spans.decision_attributes(answer)
            if not (self._is_sampled or unit.is_kept):
                # A copy: the message itself would keep its audio in memory until the events are
                # written.
                unit.stage_times = session_pb2.StageTimes()
                unit.stage_times.CopyFrom(answer.stage_times)
        self._unwritten[unit.sequence] = unit
        return lambda: self._written(unit)

    def _written(self, unit: _Unit) -> None:
        if self._unwritten.pop(unit.sequence, None) is not None:
            self._finish(unit, self._clock.now().wall_ns)

    def _finish(self, unit: _Unit, end_ns: int) -> None:
        """Export a unit's span, if the unit is sampled or must be kept."""
        is_late = end_ns - unit.receipt.received_ns > self._deadline_ns
        if not (self._is_sampled or unit.is_kept or (is_late and unit.answered_ns)):
            return
        attributes = {**self._attributes, spans.UNIT_OUTCOME: unit.outcome}
        if unit.sequence >= 0:
            attributes[spans.UNIT_SEQUENCE] = unit.sequence
        if is_late:
            attributes[spans.UNIT_IS_LATE] = True
            move = self._last_move
            if move and unit.receipt.received_ns < move.end_ns and move.begin_ns < end_ns:
                attributes.update(move.attributes)
        if unit.dropped_count:
            attributes[spans.UNIT_DROPPED_COUNT] = unit.dropped_count
        if unit.decision:
            attributes.update(unit.decision)
        if unit.stage_times is not None:
            attributes.update(_stage_times(unit.stage_times))
        self._telemetry.record(
            FinishedSpan(
                spans.EDGE_UNIT,
                unit.ids,
                unit.receipt.received_ns,
                end_ns,
                attributes,
                links=self._links,
                stages=unit.stages(),
                is_error=unit.outcome == spans.FAILED,
            )
        )


def _stage_times(times: session_pb2.StageTimes) -> dict[str, AttributeValue]:
    return {
        f"{spans.STAGE_PREFIX}{stage.name}_ms": to_seconds(seconds) * 1e3
        for stage, seconds in times.ListFields()
    }
