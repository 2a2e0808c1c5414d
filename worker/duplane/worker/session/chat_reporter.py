"""Makes the messages of one turn of chat, counts its tokens, and records its spans.

There is one span for the preparation, one for the prefill, and one for each delta. If spans are not
exported, each costs one comparison.
"""

from __future__ import annotations

import time
from collections.abc import Collection

from opentelemetry.trace import Span, StatusCode
from opentelemetry.util.types import AttributeValue

from duplane.fabric.audio import pcm_from_samples
from duplane.fabric.monitoring import spans
from duplane.fabric.monitoring.spans import Telemetry
from duplane.fabric.v1 import session_pb2
from duplane.worker.engine.events import ChatStep
from duplane.worker.metrics import WorkerMetrics
from duplane.worker.models.chat import ChatOutput, Finish
from duplane.worker.models.interface import PreparedChat
from duplane.worker.session.stages import stage_attributes, stage_times

_FINISH_REASONS = {
    Finish.STOP: session_pb2.FINISH_REASON_STOP,
    Finish.LENGTH: session_pb2.FINISH_REASON_LENGTH,
    Finish.CONTEXT_FULL: session_pb2.FINISH_REASON_CONTEXT_FULL,
}


class ChatReporter:
    """Reports one turn. `span` is the span of the turn; the caller ends it."""

    def __init__(self, tracer: Telemetry, span: Span, metrics: WorkerMetrics) -> None:
        self._tracer = tracer
        self._metrics = metrics
        self._span = span
        self._context = spans.inject(span)
        self._part: Span | None = None
        self._part_stages_s: dict[str, float] = {}
        self._stages_s: dict[str, float] = {}
        self._unsent_stages_s: dict[str, float] = {}  # stages of the steps since the last delta
        self._delta_s = time.monotonic()
        self._sequence = 0
        self._counts = session_pb2.TokenCounts()
        self._prompt_rows = 0
        self._ignored_fields: list[str] = []
        self._is_prefilled = False

    def begin_preparation(self) -> None:
        """Begin the span of the preparation: checks, videos and layout of the prompt."""
        self._begin(spans.WORKER_CHAT_PREPARE)

    def begin_prefill(self, prepared: PreparedChat, ignored_fields: Collection[str]) -> None:
        """Count the tokens of the prompt, and begin the span of its prefill."""
        self._ignored_fields = sorted(ignored_fields)
        media_rows = prepared.image_rows + prepared.audio_rows
        self._prompt_rows = prepared.prompt_rows
        self._counts.input_video_token_count = prepared.image_rows
        self._counts.input_audio_token_count = prepared.audio_rows
        self._counts.input_text_token_count = prepared.prompt_rows - media_rows
        self._end_part({spans.PROMPT_TOKEN_COUNT: prepared.prompt_rows})
        self._begin(spans.WORKER_CHAT_PREFILL)

    def responses(self, step: ChatStep) -> list[session_pb2.ChatResponse]:
        """Return the messages that follow from a step: `prefilled`, `delta`, `done`, or none."""
        output = step.output
        self._count(output)
        attributes: dict[str, AttributeValue] = {
            spans.BATCH_SIZE: step.batch_size,
            spans.CONTEXT_TOKEN_COUNT: output.context_length,
        }
        responses: list[session_pb2.ChatResponse] = []
        if output.is_prefilled and not self._is_prefilled:
            self._is_prefilled = True
            self._end_part(attributes)
            self._begin(spans.WORKER_CHAT_PIECE)
            prefilled = session_pb2.Prefilled(
                prompt_token_count=self._prompt_rows, ignored_fields=self._ignored_fields
            )
            responses.append(session_pb2.ChatResponse(prefilled=prefilled))
        if output.text or output.audio.size or output.token_ids:
            self._end_part({**attributes, spans.CHAT_SEQUENCE: self._sequence})
            responses.append(session_pb2.ChatResponse(delta=self._delta(step)))
            self._begin(spans.WORKER_CHAT_PIECE)
        if output.finish is not None:
            self._span.set_attribute(spans.CHAT_FINISH, output.finish.name)
            reason = _FINISH_REASONS[output.finish]
            done = session_pb2.Done(reason=reason, token_counts=self._counts)
            responses.append(session_pb2.ChatResponse(done=done))
        return responses

    def finish(self, error_reason: str | None) -> None:
        """Add the stage times to the turn's span, and the error if the turn failed.

        After an error, the span of the unfinished part of the turn ends with this error. Without an
        error, this span is discarded.
        """
        self._metrics.chat_ended(self._counts)
        self._span.set_attributes(stage_attributes(self._stages_s))
        if error_reason is None:
            return
        for span in (self._span, self._part):
            if span is not None:
                span.set_attribute(spans.ERROR_TYPE, error_reason)
                span.set_status(StatusCode.ERROR)
        self._end_part({})

    def _delta(self, step: ChatStep) -> session_pb2.ChatDelta:
        output, now_s = step.output, time.monotonic()
        self._metrics.chat_delta(now_s - self._delta_s, step.batch_size)
        delta = session_pb2.ChatDelta(
            sequence=self._sequence,
            text=output.text,
            audio=pcm_from_samples(output.audio),
            token_ids=output.token_ids,
            stage_times=stage_times({**self._unsent_stages_s, "total": now_s - self._delta_s}),
            context_token_count=output.context_length,
        )
        self._unsent_stages_s, self._delta_s = {}, now_s
        self._sequence += 1
        return delta

    def _count(self, output: ChatOutput) -> None:
        self._counts.output_text_token_count += len(output.token_ids)
        self._counts.output_audio_token_count += output.audio_token_count
        self._span.set_attribute(spans.CONTEXT_TOKEN_COUNT, output.context_length)
        for stage, seconds in output.stage_s.items():
            for sums in (self._part_stages_s, self._stages_s, self._unsent_stages_s):
                sums[stage] = sums.get(stage, 0.0) + seconds

    def _begin(self, name: str) -> None:
        self._part_stages_s = {}
        if self._context is not None:
            self._part = self._tracer.start(name, parent=self._context)

    def _end_part(self, attributes: dict[str, AttributeValue]) -> None:
        if self._part is None:
            return
        self._part.set_attributes({**attributes, **stage_attributes(self._part_stages_s)})
        self._part.end()
        self._part = None
