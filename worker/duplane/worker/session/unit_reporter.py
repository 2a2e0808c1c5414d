"""Makes the messages about the units of one session, and reports each unit to metrics and spans."""

from __future__ import annotations

from collections.abc import Sequence

from duplane.fabric.audio import pcm_from_samples
from duplane.fabric.v1 import session_pb2
from duplane.worker.admission import Admission
from duplane.worker.engine.events import AnsweredUnit, FailedUnit
from duplane.worker.engine.inbox import Entry
from duplane.worker.metrics import WorkerMetrics
from duplane.worker.models.types import SpeechOutcome, SpeechResult, StateChange, UnitOutput
from duplane.worker.session.stages import stage_times
from duplane.worker.session.unit_spans import UnitSpans

_COUNTS = tuple(session_pb2.TokenCounts.DESCRIPTOR.fields_by_name)
_SPEECH_OUTCOMES = {
    SpeechOutcome.SPOKEN: session_pb2.SPEECH_OUTCOME_SPOKEN,
    SpeechOutcome.INTERRUPTED: session_pb2.SPEECH_OUTCOME_INTERRUPTED,
    SpeechOutcome.REFUSED: session_pb2.SPEECH_OUTCOME_REFUSED,
}


class UnitReporter:
    """Reports one session's units."""

    def __init__(self, spans: UnitSpans, metrics: WorkerMetrics, admission: Admission) -> None:
        self._admission = admission
        self._spans = spans
        self._metrics = metrics
        self._token_counts = session_pb2.TokenCounts()
        self._unit_count = 0
        self._reported_dropped_count = 0

    def opening(self) -> None:
        """Record that the client has requested to open the conversation."""
        self._spans.opening()

    def opened(self) -> None:
        """Record that the conversation is open."""
        self._spans.opened()

    def delta(self, answered: AnsweredUnit, now_s: float) -> session_pb2.Delta:
        """Return the delta of a unit. `now_s` is the present monotonic time."""
        record, output = answered.record, answered.output
        free_s = min(max(record.settle_s[1], record.queued_s), record.started_s)
        stages_s = {
            "prepare": record.queued_s - record.received_s,
            "inbox": free_s - record.queued_s,
            "device": record.started_s - free_s + record.waited_s,
            **output.stage_s,
            "total": now_s - record.received_s,
        }
        delta = session_pb2.Delta(
            sequence=record.sequence,
            end_of_turn=output.end_of_turn or output.interrupted_turn,
            interrupted_turn=output.interrupted_turn,
            context_token_count=output.context_length,
            dropped_unit_count=record.dropped_count - self._reported_dropped_count,
            token_counts=session_pb2.TokenCounts(
                input_audio_token_count=output.input_audio_count,
                input_video_token_count=output.input_video_count,
                input_text_token_count=output.input_mark_count,
                output_text_token_count=output.text_token_count,
                output_audio_token_count=output.audio_token_count,
            ),
            stage_times=stage_times(stages_s),
            token_ids=output.token_ids,
            listen_probability=output.listen_probability,
            rebuild_state=output.state,
            state_change=_state_change(output.change),
            reach=reach_of(output),
        )
        if output.speech_request is not None:
            delta.speech_request = output.speech_request
        if results := record.unit.speech_results + output.speech_results:
            delta.speech_results.extend(map(_speech_result, results))
            self._metrics.speech_ended(results)
        if output.is_listen:
            delta.listen.is_forced = output.is_forced
            delta.listen.SetInParent()
        else:
            delta.speech.text = output.text
            delta.speech.audio = pcm_from_samples(output.audio)
            delta.speech.sample_count = output.audio.size
            self._admission.note_speech(stages_s["total"], now_s)
        self._unit_count += 1
        self._metrics.unit(answered, delta, stages_s)
        self._reported_dropped_count = record.dropped_count
        for name in _COUNTS:
            total = getattr(self._token_counts, name) + getattr(delta.token_counts, name)
            setattr(self._token_counts, name, total)
        if trace := self._spans.delta(answered, delta, now_s):
            delta.trace.CopyFrom(trace)
        return delta

    def failed(self, failure: FailedUnit) -> session_pb2.Failed:
        """Return the answer to a unit that has no output."""
        self._spans.failed(failure)
        self._metrics.unit_failed()
        results = _failed_speech(failure)
        self._metrics.speech_ended(results)
        return session_pb2.Failed(
            sequence=failure.sequence,
            reason=failure.reason,
            message=failure.message,
            field=failure.field,
            speech_results=map(_speech_result, results),
        )

    def dropped(self, entry: Entry) -> None:
        """Record a unit that was dropped; the next delta counts it."""
        self._spans.dropped(entry)

    def closed(self, closed: session_pb2.Closed, dropped_count: int) -> session_pb2.Closed:
        """Return `closed` with the session's numbers of tokens and units."""
        return session_pb2.Closed(
            reason=closed.reason,
            message=closed.message,
            token_counts=self._token_counts,
            unit_count=self._unit_count,
            dropped_unit_count=dropped_count,
        )


def reach_of(output: UnitOutput) -> session_pb2.UnitReach | None:
    """Return on which earlier units a later rebuild depends; None if on all of them."""
    reach = output.reach
    if reach is None:
        return None
    return session_pb2.UnitReach(
        row_count=reach.row_count,
        context_unit_count=reach.context_units,
        sound_unit_count=reach.sound_units,
        turn_unit_count=reach.turn_units,
    )


def _failed_speech(failure: FailedUnit) -> Sequence[SpeechResult]:
    """Return the results that a unit had before it ran, and the ends of its requests to speak."""
    if not failure.record:
        return ()
    unit = failure.record.unit
    refused = SpeechOutcome.REFUSED, failure.reason, failure.message, failure.field
    return (*unit.speech_results, *(SpeechResult(each.number, *refused) for each in unit.speech))


def _speech_result(result: SpeechResult) -> session_pb2.SpeechResult:
    return session_pb2.SpeechResult(
        number=result.number,
        outcome=_SPEECH_OUTCOMES[result.outcome],
        reason=result.reason,
        message=result.message,
        field=result.field,
    )


def _state_change(change: StateChange | None) -> session_pb2.StateChange | None:
    """Return the state of a unit for workers of release 0.1."""
    if change is None:
        return None
    return session_pb2.StateChange(
        speech_token_ids=change.speech_token_ids,
        chosen_token_ids=change.chosen_token_ids,
        draw_count=change.draw_count,
        interrupted_turn=change.interrupted_turn,
    )
