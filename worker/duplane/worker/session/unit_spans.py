"""The worker's spans of a session: its opening, and its units with their stages."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from opentelemetry.trace import Span, StatusCode
from opentelemetry.util.types import AttributeValue

from duplane.fabric.monitoring import spans
from duplane.fabric.monitoring.spans import FinishedSpan, SpanIds, Telemetry
from duplane.fabric.v1 import lease_pb2, session_pb2, trace_pb2
from duplane.worker.engine.events import AnsweredUnit, FailedUnit
from duplane.worker.engine.inbox import Entry
from duplane.worker.engine.unit_record import UnitRecord
from duplane.worker.session.stages import stage_attributes


def unit_stages(
    record: UnitRecord, stage_s: Mapping[str, float], now_s: float
) -> list[tuple[str, float]]:
    """Return the stages of a unit in order, each with its beginning by the monotonic clock.

    Each stage lasts until the next one, the last stage until `now_s`. `stage_s` has the durations
    of the model's stages. All waits for the device come before these, also those between the unit's
    launches. Stages that took no time are left out.
    """
    settle_s, settled_s = record.settle_s
    ends_s = [
        (spans.PREPARE, record.queued_s),
        (spans.INBOX, min(settle_s, record.started_s)),
        (spans.SETTLE, min(settled_s, record.started_s)),
        (spans.DEVICE, record.started_s + record.waited_s),
    ]
    end_s = record.started_s + record.waited_s
    for stage in spans.MODEL_STAGES:
        if seconds := stage_s.get(stage, 0.0):
            end_s += seconds
            ends_s.append((stage, min(end_s, record.finished_s)))
    ends_s += [(spans.RUN, record.finished_s), (spans.DELIVER, now_s)]
    stages: list[tuple[str, float]] = []
    begin_s = record.received_s
    for stage, end_s in ends_s:
        if end_s > begin_s:
            stages.append((stage, begin_s))
            begin_s = end_s
    return stages


class UnitSpans:
    """The spans of one session's units. They link to `trace`, the session's span in the edge.

    `parent` is the worker's span of the session. A unit is late if its delta comes more than
    `unit_s` after the edge received the unit.
    """

    def __init__(
        self,
        claims: lease_pb2.LeaseClaims,
        telemetry: Telemetry,
        trace: trace_pb2.TraceContext | None,
        parent: trace_pb2.TraceContext | None,
        unit_s: float,
    ) -> None:
        self._telemetry = telemetry
        self._parent = parent
        self._deadline_ns = int(unit_s * 1e9)
        self._links = spans.link_to(trace)
        self._is_sampled = spans.is_sampled(trace)
        self._opening: Span | None = None
        self._attributes: dict[str, AttributeValue] = {
            spans.SESSION_ID: claims.session_id,
            spans.LEASE_ID: claims.lease_id,
            spans.SLOT: claims.slot,
        }

    def opening(self) -> None:
        """Begin the span of the opening."""
        self._opening = self._telemetry.start(
            spans.WORKER_OPEN, parent=self._parent, attributes=self._attributes
        )

    def opened(self) -> None:
        """End the span of the opening."""
        if self._opening is not None:
            self._opening.end()
            self._opening = None

    def ended(self) -> None:
        """End the span of an opening that has not succeeded, with an error."""
        if self._opening is not None:
            self._opening.set_status(StatusCode.ERROR)
        self.opened()

    def delta(
        self, answered: AnsweredUnit, delta: session_pb2.Delta, now_s: float
    ) -> trace_pb2.TraceContext | None:
        """Record the span of a unit that has a delta. Return the trace context for the delta."""
        record, output = answered.record, answered.output
        if not self._telemetry.is_exported:
            return record.trace  # unchanged, so that the edge does not treat the unit as late
        end_ns = _wall_ns(record, now_s)
        is_late = end_ns - (record.edge_time_ns or record.receive_time_ns) > self._deadline_ns
        is_kept = is_late or (spans.is_sampled(record.trace) if record.trace else self._is_sampled)
        parent = spans.extract(record.trace)
        ids = SpanIds.new(parent.trace_id)
        context = trace_pb2.TraceContext(traceparent=ids.traceparent(is_sampled=is_kept))
        if not is_kept:
            return context
        stages = unit_stages(record, output.stage_s, now_s)
        counts = delta.token_counts
        input_count = counts.input_audio_token_count + counts.input_video_token_count
        attributes = {
            **self._attributes,
            spans.UNIT_SEQUENCE: record.sequence,
            spans.UNIT_OUTCOME: delta.WhichOneof("outcome") or "",
            spans.BATCH_SIZE: record.batch_size,
            spans.CONTEXT_TOKEN_COUNT: delta.context_token_count,
            **spans.decision_attributes(delta),
            **stage_attributes(_durations(stages, now_s)),
        }
        if is_late:
            attributes[spans.UNIT_IS_LATE] = True
        if delta.dropped_unit_count:
            attributes[spans.UNIT_DROPPED_COUNT] = delta.dropped_unit_count
        self._telemetry.record(
            FinishedSpan(
                spans.WORKER_UNIT,
                ids,
                record.receive_time_ns,
                end_ns,
                attributes,
                parent=parent if parent.is_valid else None,
                links=self._links,
                stages=[(stage, _wall_ns(record, begin_s)) for stage, begin_s in stages],
                token_counts={
                    "prefill": {
                        spans.INPUT_TOKEN_COUNT: input_count + counts.input_text_token_count
                    },
                    "decode": {spans.OUTPUT_TOKEN_COUNT: len(output.token_ids)},
                    "talker": {spans.SPEECH_TOKEN_COUNT: counts.output_audio_token_count},
                },
            )
        )
        return context

    def failed(self, failure: FailedUnit) -> None:
        """Record the span of a unit that has no output."""
        self._ended(failure, failure.record, {spans.ERROR_TYPE: failure.reason}, spans.FAILED)

    def dropped(self, entry: Entry) -> None:
        """Record the span of a unit that was dropped in the inbox."""
        self._ended(entry, entry if isinstance(entry, UnitRecord) else None, {}, spans.DROPPED)

    def _ended(
        self,
        entry: Entry,
        record: UnitRecord | None,
        attributes: dict[str, AttributeValue],
        outcome: str,
    ) -> None:
        """Record the span of a unit without a delta. `record` is None if the unit was refused."""
        if not self._telemetry.is_exported:
            return
        now_s, end_ns = time.monotonic(), time.time_ns()
        stages = [(spans.PREPARE, entry.receive_time_ns)]
        if record is not None:
            if not record.finished_s:  # it did not run
                record.started_s = now_s
                record.finished_s = now_s
                record.settle_s = (now_s, now_s)
            begun = unit_stages(record, {}, now_s)
            stages = [(stage, _wall_ns(record, begin_s)) for stage, begin_s in begun]
        parent = spans.extract(entry.trace)
        self._telemetry.record(
            FinishedSpan(
                spans.WORKER_UNIT,
                SpanIds.new(parent.trace_id),
                entry.receive_time_ns,
                end_ns,
                {
                    **self._attributes,
                    spans.UNIT_SEQUENCE: entry.sequence,
                    spans.UNIT_OUTCOME: outcome,
                    **attributes,
                },
                parent=parent if parent.is_valid else None,
                links=self._links,
                stages=stages,
                is_error=outcome == spans.FAILED,
            )
        )


def _durations(stages: Sequence[tuple[str, float]], end_s: float) -> dict[str, float]:
    """Return the seconds of each stage. The last stage lasts until `end_s`."""
    ends_s = [begin_s for _, begin_s in stages[1:]] + [end_s]
    return {
        stage: until_s - begin_s for (stage, begin_s), until_s in zip(stages, ends_s, strict=True)
    }


def _wall_ns(record: UnitRecord, monotonic_s: float) -> int:
    return record.receive_time_ns + int((monotonic_s - record.received_s) * 1e9)
