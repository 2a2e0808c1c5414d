"""What a session tells about its units: messages, sums, and one span for each."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration
from opentelemetry.trace import StatusCode

from duplane.fabric import telemetry
from duplane.fabric.audio import pcm_from_samples
from duplane.fabric.telemetry import Telemetry
from duplane.fabric.v1 import lease_pb2, session_pb2, trace_pb2
from duplane.worker.inbox import Refusal
from duplane.worker.model.types import UnitFailure, UnitOutput
from duplane.worker.rounds import Done

_MODEL_STAGES = ("audio", "vision", "prefill", "decode", "talker", "vocoder", "settle")
ENGINE_FAILED = "ENGINE_FAILED"
# What the model answers to a unit -> the field of the unit that is at fault.
_FIELDS_AT_FAULT = {
    "AUDIO_INVALID": "audio",
    "AUDIO_TOO_SHORT": "audio",
    "AUDIO_BACKLOG": "audio",
    "FRAMES_UNSUPPORTED": "video_frames",
    "IMAGE_INVALID": "video_frames",
}


class Account:
    """Counts one session's units and makes the messages about them.

    `session_trace` is what the spans of the units link to.
    """

    def __init__(
        self,
        claims: lease_pb2.LeaseClaims,
        tracer: Telemetry,
        session_trace: trace_pb2.TraceContext | None,
    ) -> None:
        self._tracer = tracer
        self._session_trace = session_trace
        self._attributes = {
            telemetry.SESSION_ID: claims.session_id,
            telemetry.LEASE_ID: claims.lease_id,
            telemetry.SLOT: claims.slot,
        }
        self._token_counts = session_pb2.TokenCounts()
        self._unit_count = 0
        self._told_dropped_count = 0

    def delta(self, done: Done, output: UnitOutput, now_s: float) -> session_pb2.Delta:
        """Return the delta of a unit that led to something. `now_s` is monotonic."""
        unit = done.taken.unit
        stages_s = {
            "inbox": done.started_s - unit.received_s,
            # A stage that took no time did not run.
            **{
                stage: output.stage_s[stage] for stage in _MODEL_STAGES if output.stage_s.get(stage)
            },
            "total": now_s - unit.received_s,
        }
        delta = session_pb2.Delta(
            sequence=unit.sequence,
            end_of_turn=output.end_of_turn,
            context_token_count=output.context_length,
            dropped_unit_count=done.taken.dropped_count - self._told_dropped_count,
            token_counts=session_pb2.TokenCounts(
                input_audio_token_count=output.input_audio_count,
                input_video_token_count=output.input_video_count,
                input_text_token_count=output.input_mark_count,
                output_text_token_count=output.text_token_count,
                output_audio_token_count=output.audio_token_count,
            ),
            stage_times=session_pb2.StageTimes(
                **{stage: _duration(seconds) for stage, seconds in stages_s.items()}
            ),
            token_ids=output.token_ids,
        )
        if output.is_listen:
            delta.listen.SetInParent()
        else:
            delta.speech.text = output.text
            delta.speech.audio = pcm_from_samples(output.audio)
        self._count(done, delta.token_counts)
        trace = self._trace_delta(done, delta, stages_s)
        if trace:
            delta.trace.CopyFrom(trace)
        return delta

    def failed(self, done: Done, failure: UnitFailure) -> session_pb2.Failed:
        """Return the answer to a unit that the model could not use."""
        unit = done.taken.unit
        self._unit_count += 1
        self._trace_failure(unit.sequence, failure.reason, unit.receive_time_ns, unit.trace)
        return session_pb2.Failed(
            sequence=unit.sequence,
            reason=failure.reason,
            message=failure.message,
            field=_FIELDS_AT_FAULT.get(failure.reason, ""),
        )

    def refused(self, refusal: Refusal) -> session_pb2.Failed:
        """Return the answer to a unit that never reached the model."""
        self._trace_failure(
            refusal.sequence, refusal.reason, refusal.receive_time_ns, refusal.trace
        )
        return session_pb2.Failed(
            sequence=refusal.sequence,
            reason=refusal.reason,
            message=refusal.message,
            field=refusal.field,
        )

    def closed(self, closed: session_pb2.Closed, dropped_count: int) -> session_pb2.Closed:
        """Return `closed` with the sums of the session."""
        return session_pb2.Closed(
            reason=closed.reason,
            message=closed.message,
            token_counts=self._token_counts,
            unit_count=self._unit_count,
            dropped_unit_count=dropped_count,
        )

    def _count(self, done: Done, counts: session_pb2.TokenCounts) -> None:
        self._unit_count += 1
        self._told_dropped_count = done.taken.dropped_count
        for kind in session_pb2.TokenCounts.DESCRIPTOR.fields_by_name:
            total = getattr(self._token_counts, kind) + getattr(counts, kind)
            setattr(self._token_counts, kind, total)

    def _trace_delta(
        self, done: Done, delta: session_pb2.Delta, stages_s: dict[str, float]
    ) -> trace_pb2.TraceContext | None:
        unit = done.taken.unit
        span = self._tracer.start(
            telemetry.WORKER_UNIT,
            parent=unit.trace,
            link=self._session_trace,
            start_time_ns=unit.receive_time_ns,
        )
        if not span.is_recording():
            return telemetry.inject(span)
        span.set_attributes(
            {
                **self._attributes,
                telemetry.UNIT_SEQUENCE: unit.sequence,
                telemetry.UNIT_OUTCOME: delta.WhichOneof("outcome") or "",
                telemetry.UNIT_DROPPED_COUNT: delta.dropped_unit_count,
                telemetry.BATCH_SIZE: done.batch_size,
                telemetry.CONTEXT_TOKEN_COUNT: delta.context_token_count,
                **{
                    f"{telemetry.STAGE_PREFIX}{stage}_ms": seconds * 1e3
                    for stage, seconds in stages_s.items()
                },
            }
        )
        span.end()
        return telemetry.inject(span)

    def _trace_failure(
        self, sequence: int, reason: str, start_time_ns: int, parent: trace_pb2.TraceContext | None
    ) -> None:
        span = self._tracer.start(
            telemetry.WORKER_UNIT,
            parent=parent,
            link=self._session_trace,
            start_time_ns=start_time_ns,
        )
        if span.is_recording():
            span.set_attributes(
                {
                    **self._attributes,
                    telemetry.UNIT_SEQUENCE: sequence,
                    telemetry.UNIT_OUTCOME: "failed",
                    telemetry.ERROR_TYPE: reason,
                }
            )
            span.set_status(StatusCode.ERROR)
        span.end()


def _duration(seconds: float) -> Duration:
    nanos = max(0, round(seconds * 1e9))
    return Duration(seconds=nanos // 1_000_000_000, nanos=nanos % 1_000_000_000)
