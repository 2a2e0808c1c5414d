"""Makes the messages about the units of one session, sums them up, and records a span per unit."""

from __future__ import annotations

from opentelemetry.trace import StatusCode

from duplane.fabric.audio import pcm_from_samples
from duplane.fabric.monitoring import spans
from duplane.fabric.monitoring.spans import Telemetry
from duplane.fabric.v1 import lease_pb2, session_pb2, trace_pb2
from duplane.worker.engine.events import FailedUnit
from duplane.worker.metrics import WorkerMetrics
from duplane.worker.model.types import UnitOutput
from duplane.worker.session.stages import stage_attributes, stage_times

_COUNTS = tuple(session_pb2.TokenCounts.DESCRIPTOR.fields_by_name)


class UnitReporter:
    """Reports one session's units. Their spans link to `session_trace`."""

    def __init__(
        self,
        claims: lease_pb2.LeaseClaims,
        tracer: Telemetry,
        session_trace: trace_pb2.TraceContext | None,
        metrics: WorkerMetrics,
    ) -> None:
        self._tracer = tracer
        self._session_trace = session_trace
        self._metrics = metrics
        self._attributes = {
            spans.SESSION_ID: claims.session_id,
            spans.LEASE_ID: claims.lease_id,
            spans.SLOT: claims.slot,
        }
        self._token_counts = session_pb2.TokenCounts()
        self._unit_count = 0
        self._reported_dropped_count = 0

    def delta(self, output: UnitOutput, now_s: float) -> session_pb2.Delta:
        """Return the delta of a unit. `now_s` is monotonic."""
        unit = output.unit
        stages_s = {
            "inbox": unit.started_s - unit.received_s,
            **output.stage_s,
            "total": now_s - unit.received_s,
        }
        delta = session_pb2.Delta(
            sequence=unit.sequence,
            end_of_turn=output.end_of_turn or output.interrupted_turn,
            context_token_count=output.context_length,
            dropped_unit_count=unit.dropped_count - self._reported_dropped_count,
            token_counts=session_pb2.TokenCounts(
                input_audio_token_count=output.input_audio_count,
                input_video_token_count=output.input_video_count,
                input_text_token_count=output.input_mark_count,
                output_text_token_count=output.text_token_count,
                output_audio_token_count=output.audio_token_count,
            ),
            stage_times=stage_times(stages_s),
            token_ids=output.token_ids,
        )
        if output.is_listen:
            delta.listen.SetInParent()
        else:
            delta.speech.text = output.text
            delta.speech.audio = pcm_from_samples(output.audio)
        self._unit_count += 1
        self._metrics.unit(output, delta, stages_s)
        self._reported_dropped_count = unit.dropped_count
        for name in _COUNTS:
            total = getattr(self._token_counts, name) + getattr(delta.token_counts, name)
            setattr(self._token_counts, name, total)
        trace = self._trace_delta(output, delta, stages_s)
        if trace:
            delta.trace.CopyFrom(trace)
        return delta

    def failed(self, failure: FailedUnit) -> session_pb2.Failed:
        """Return the answer to a unit that has no output."""
        self._trace_failure(failure)
        self._metrics.unit_failed()
        return session_pb2.Failed(
            sequence=failure.sequence,
            reason=failure.reason,
            message=failure.message,
            field=failure.field,
        )

    def closed(self, closed: session_pb2.Closed, dropped_count: int) -> session_pb2.Closed:
        """Return `closed` with the session's numbers of tokens and units."""
        return session_pb2.Closed(
            reason=closed.reason,
            message=closed.message,
            token_counts=self._token_counts,
            unit_count=self._unit_count,
            dropped_unit_count=dropped_count,
        )

    def _trace_delta(
        self, output: UnitOutput, delta: session_pb2.Delta, stages_s: dict[str, float]
    ) -> trace_pb2.TraceContext | None:
        unit = output.unit
        if not (self._tracer.is_exported or (unit.trace and unit.trace.traceparent)):
            return None  # there is no trace to continue
        span = self._tracer.start(
            spans.WORKER_UNIT,
            parent=unit.trace,
            link=self._session_trace,
            start_time_ns=unit.receive_time_ns,
        )
        if span.is_recording():
            span.set_attributes(
                {
                    **self._attributes,
                    spans.UNIT_SEQUENCE: unit.sequence,
                    spans.UNIT_OUTCOME: delta.WhichOneof("outcome") or "",
                    spans.UNIT_DROPPED_COUNT: delta.dropped_unit_count,
                    spans.BATCH_SIZE: unit.batch_size,
                    spans.CONTEXT_TOKEN_COUNT: delta.context_token_count,
                    **stage_attributes(stages_s),
                }
            )
            span.end()
        return spans.inject(span)

    def _trace_failure(self, failure: FailedUnit) -> None:
        span = self._tracer.start(
            spans.WORKER_UNIT,
            parent=failure.trace,
            link=self._session_trace,
            start_time_ns=failure.receive_time_ns,
        )
        if span.is_recording():
            span.set_attributes(
                {
                    **self._attributes,
                    spans.UNIT_SEQUENCE: failure.sequence,
                    spans.UNIT_OUTCOME: "failed",
                    spans.ERROR_TYPE: failure.reason,
                }
            )
            span.set_status(StatusCode.ERROR)
        span.end()
