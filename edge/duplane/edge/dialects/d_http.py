"""A turn of dialect D over plain HTTP: one request, answered by one JSON object."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import orjson

from duplane.edge.client_errors import ErrorCode
from duplane.edge.clock import Moment
from duplane.edge.close import Close
from duplane.edge.dialects.actions import Turn
from duplane.edge.dialects.chat import ChatDialect
from duplane.edge.dialects.chat_request import read_turn
from duplane.edge.dialects.d import DEFAULTS, REQUEST
from duplane.edge.dialects.dialect import (
    Decoders,
    Lifecycle,
    Phase,
    Replies,
    ServerEvents,
    Transitions,
    with_optional_audio,
)
from duplane.edge.identity import Identity
from duplane.edge.modes import Mode
from duplane.edge.payload.fields import Fields
from duplane.edge.settings import Limits
from duplane.fabric.durations import to_seconds
from duplane.fabric.v1 import lease_pb2, session_pb2


class DialectDHttp(ChatDialect):
    """One HTTP request. The only event is the answer; a refusal is an HTTP status.

    The answer includes the time that the request waited for its slot, counted from `received`.
    """

    name: ClassVar[str] = "D"
    is_one_shot: ClassVar[bool] = True
    begins_with_slot: ClassVar[bool] = False
    only_event: ClassVar[str] = REQUEST
    transitions: ClassVar[Transitions] = {(Phase.START, REQUEST): Phase.ACTIVE}
    replies: ClassVar[Replies] = {REQUEST: ("answer",)}
    server_events: ClassVar[ServerEvents] = {"answer": frozenset({Phase.ACTIVE})}

    def __init__(self, identity: Identity, limits: Limits, mode: Mode, received: Moment) -> None:
        super().__init__(identity, limits, mode)
        self._received = received
        self._begun = received
        self._estimated_wait_s: float | None = None  # the scheduler's first estimate

    def _event_decoders(self) -> Decoders:
        return {REQUEST: self._decode_request}

    def _decode_request(self, event: Fields) -> Turn:
        return replace(read_turn(event, DEFAULTS, self.limits, REQUEST), is_streaming=False)

    def queued(self, queued: lease_pb2.Queued, *, is_update: bool) -> list[bytes]:
        """Remember the first estimate of the wait; an HTTP client gets no queue events."""
        if not is_update and self._estimated_wait_s is None:
            self._estimated_wait_s = to_seconds(queued.estimated_wait)
        return []

    def queue_done(self) -> list[bytes]:
        """Render nothing: an HTTP client gets no queue events."""
        return []

    def begin(self, turn: Turn, now: Moment) -> None:
        """Begin to answer the turn, or begin again on another slot."""
        super().begin(turn, now)
        self._begun = now

    def done(self, done: session_pb2.Done, now: Moment) -> list[bytes]:
        """Render the answer. `cached_tokens` is 0, since no request uses an earlier context."""
        answer_count = done.token_counts.output_text_token_count
        prompt_count = self._prompt_token_count
        event: dict[str, object] = {
            "text": "".join(self._text),
            "success": True,
            "error": None,
            "audio_sample_rate": self.output_sound.rate_hertz,
            "tokens_generated": answer_count,
            "token_stats": {
                "cached_tokens": 0,
                "input_tokens": prompt_count,
                "generated_tokens": answer_count,
                "total_tokens": prompt_count + answer_count,
            },
            "duration_ms": round((now.monotonic_s - self._begun.monotonic_s) * 1e3, 1),
            "queue_wait_ms": round((self._begun.monotonic_s - self._received.monotonic_s) * 1e3),
            "estimated_queue_wait_s": round(self._estimated_wait_s or 0.0, 1),
            "recording_session_id": self.identity.recording_id or None,
            **self.identity.recording_field,
            **self._model_fields,
        }
        return [with_optional_audio(event, b"".join(self._audio))]

    def ended(self, close: Close, now: Moment) -> list[bytes]:
        """Render nothing: the HTTP status says why a request was refused."""
        del close, now
        self._advance(Lifecycle.CLOSED)
        return []

    def error(
        self, code: ErrorCode, message: str, now: Moment, input_id: str | None = None
    ) -> bytes:
        """Render the body of the answer to a refused request."""
        del code, now, input_id
        return error_body(message)


def error_body(message: str) -> bytes:
    """Render a refusal. Its message is in two fields, since clients read one or the other."""
    return orjson.dumps({"detail": message, "error": message, "success": False})
