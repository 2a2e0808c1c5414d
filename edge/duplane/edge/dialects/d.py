"""Dialect D: one request per connection; `prefill_done`, chunks, `done`; errors are flat text."""

from __future__ import annotations

from typing import ClassVar

import orjson

from duplane.edge.client_errors import ErrorCode
from duplane.edge.clock import Moment
from duplane.edge.close import CLOSE_CODES, NOT_READ, Close, CloseReason
from duplane.edge.dialects.actions import Action, Reply
from duplane.edge.dialects.chat import ChatDialect
from duplane.edge.dialects.chat_request import ChatDefaults, read_turn
from duplane.edge.dialects.dialect import (
    Decoders,
    Phase,
    Replies,
    ServerEvents,
    Transitions,
    queue_events,
    with_optional_audio,
)
from duplane.edge.dialects.resumption import refuse_resumable
from duplane.edge.payload.fields import Fields
from duplane.fabric.v1 import session_pb2

REQUEST = "request"  # its events have no type of their own

DEFAULTS = ChatDefaults(
    max_new_token_count=512,
    length_penalty=1.0,
    generates_audio=True,
    temperature=0.7,
    top_p=0.8,
    use_image_id=True,
)
# For these reasons the close code is that of CLOSE_CODES. For all other reasons the code is 1000.
_CODED = frozenset(
    {
        CloseReason.SHUTDOWN,
        CloseReason.MODE_REFUSED,
        CloseReason.UNREADABLE,
        CloseReason.CREDENTIAL_ENDED,
        CloseReason.TOO_BIG,
        CloseReason.TOO_SLOW,
    }
)
_SILENT = NOT_READ | {CloseReason.ANSWERED, CloseReason.CLIENT}


class DialectD(ChatDialect):
    """One client that speaks D."""

    name: ClassVar[str] = "D"
    queue_prefix: ClassVar[str] = ""
    is_one_shot: ClassVar[bool] = True
    begins_with_slot: ClassVar[bool] = False
    only_event: ClassVar[str] = REQUEST
    transitions: ClassVar[Transitions] = {
        (Phase.START, REQUEST): Phase.ACTIVE,
        (Phase.ACTIVE, REQUEST): Phase.ACTIVE,  # ignored, since a connection has one turn
    }
    replies: ClassVar[Replies] = {REQUEST: ("prefill_done", "chunk", "done")}
    server_events: ClassVar[ServerEvents] = {
        **queue_events("", frozenset({Phase.ACTIVE})),
        "prefill_done": frozenset({Phase.ACTIVE}),
        "chunk": frozenset({Phase.ACTIVE}),
        "done": frozenset({Phase.ACTIVE}),
        "error": frozenset({Phase.START, Phase.ACTIVE}),
    }

    def _event_decoders(self) -> Decoders:
        return {REQUEST: self._decode_request}

    def _decode_request(self, event: Fields) -> Action:
        if self.phase is not Phase.START:
            return Reply(kind=REQUEST)
        refuse_resumable(event)
        return read_turn(event, DEFAULTS, self.limits, REQUEST)

    def close_code(self, close: Close) -> int:
        """Return 1000 for most reasons: the `error` event before the close has the details."""
        return CLOSE_CODES[close.reason] if close.reason in _CODED else 1000

    def prefilled(self, prefilled: session_pb2.Prefilled, now: Moment) -> list[bytes]:
        """Render `prefill_done`, with the fields of the request that have no effect."""
        super().prefilled(prefilled, now)
        ignored = self._without_effect()
        fields = {
            **self._model_fields,
            **self.identity.recording_field,
            **({"ignored_fields": ignored} if ignored else {}),
        }
        return [_event("prefill_done", input_tokens=prefilled.prompt_token_count, **fields)]

    def _delta_events(self, delta: session_pb2.ChatDelta, now: Moment) -> list[bytes]:
        del now
        event: dict[str, object] = {"type": "chunk", "text_delta": delta.text}
        return [with_optional_audio(event, delta.audio)]

    def done(self, done: session_pb2.Done, now: Moment) -> list[bytes]:
        """Render `done`, with the audio if the answer was not streamed."""
        del now
        event: dict[str, object] = {
            "type": "done",
            "text": "".join(self._text),
            "generated_tokens": done.token_counts.output_text_token_count,
            "input_tokens": self._prompt_token_count,
        }
        if self.identity.recording_id:
            event["recording_session_id"] = self.identity.recording_id
        return [with_optional_audio(event, b"".join(self._audio))]

    def _closed_events(self, close: Close, now: Moment) -> list[bytes]:
        match close.reason:
            case reason if reason in _SILENT:
                return []
            case CloseReason.SHUTDOWN:
                return [self.error(ErrorCode.SERVICE_UNAVAILABLE, "Server is shutting down", now)]
            case _:
                message = close.message or "the worker was lost"
                return [self.error(ErrorCode.INFERENCE_ERROR, message, now)]

    def error(
        self, code: ErrorCode, message: str, now: Moment, input_id: str | None = None
    ) -> bytes:
        """Render an `error` event; D has no error codes and no input ids."""
        del code, now, input_id
        return _event("error", error=message)


def _event(kind: str, **fields: object) -> bytes:
    return orjson.dumps({"type": kind, **fields})
