"""Dialect D: one request on one connection: `prefill_done`, chunks, `done`; flat errors."""

from __future__ import annotations

from typing import ClassVar

import orjson

from duplane.edge.dialects.chat import ChatDialect
from duplane.edge.dialects.chat_request import ChatDefaults, read_turn
from duplane.edge.dialects.dialect import (
    Action,
    Answer,
    Answers,
    Moment,
    Phase,
    ServerEvents,
    Transitions,
    queue_events,
    with_audio,
)
from duplane.edge.dialects.fields import Fields
from duplane.edge.ends import CLOSE_CODES, End, Ending
from duplane.edge.faults import ErrorCode
from duplane.fabric.v1 import session_pb2

REQUEST = "request"  # its events have no type of their own

DEFAULTS = ChatDefaults(
    max_new_token_count=512,
    length_penalty=1.0,
    is_spoken=True,
    temperature=0.7,
    top_p=0.8,
    use_image_id=True,
)
# Errors close as ordinary ends do; only these have a code of their own.
_CODED = frozenset({End.SHUTDOWN, End.MODE_REFUSED, End.UNREADABLE, End.TOO_BIG, End.TOO_SLOW})


class DialectD(ChatDialect):
    """One client that speaks D."""

    name: ClassVar[str] = "D"
    queue_prefix: ClassVar[str] = ""
    asks_first: ClassVar[bool] = True
    lost_while_opening: ClassVar[End] = End.FAILED
    transitions: ClassVar[Transitions] = {
        (Phase.START, REQUEST): Phase.ACTIVE,
        (Phase.ACTIVE, REQUEST): Phase.ACTIVE,  # passed over: a connection has one
    }
    answers: ClassVar[Answers] = {REQUEST: ("prefill_done", "chunk", "done")}
    server_events: ClassVar[ServerEvents] = {
        **queue_events("", frozenset({Phase.ACTIVE})),
        "prefill_done": frozenset({Phase.ACTIVE}),
        "chunk": frozenset({Phase.ACTIVE}),
        "done": frozenset({Phase.ACTIVE}),
        "error": frozenset({Phase.START, Phase.ACTIVE}),
    }

    def _kind(self, event: Fields) -> str:
        del event
        return REQUEST

    def _read(self, kind: str, event: Fields) -> Action:
        del kind
        if self.phase is not Phase.START:
            return Answer()
        return read_turn(event, DEFAULTS, self.limits)

    def close_code(self, ending: Ending) -> int:
        """Return 1000 for nearly everything: the error event says it all."""
        return CLOSE_CODES[ending.end] if ending.end in _CODED else 1000

    def _opened_events(self, opened: session_pb2.Opened, now: Moment) -> list[bytes]:
        del opened, now
        return []

    def prefilled(self, prefilled: session_pb2.Prefilled, now: Moment) -> list[bytes]:
        """Render `prefill_done`, with what the request asked for in vain."""
        super().prefilled(prefilled, now)
        ignored = self._turn.ignored_fields
        unheeded = {"ignored_fields": ignored} if ignored else {}
        count = prefilled.prompt_token_count
        return [_event("prefill_done", input_tokens=count, **unheeded)]

    def _piece_events(self, delta: session_pb2.ChatDelta, now: Moment) -> list[bytes]:
        del now
        event: dict[str, object] = {"type": "chunk", "text_delta": delta.text}
        return [_with_audio_data(event, delta.audio)]

    def done(self, done: session_pb2.Done, now: Moment) -> list[bytes]:
        """Render `done`, with all audio that was not streamed."""
        del now
        event: dict[str, object] = {
            "type": "done",
            "text": "".join(self._text),
            "generated_tokens": done.token_counts.output_text_token_count,
            "input_tokens": self._prompt_token_count,
        }
        if self.identity.recording_id:
            event["recording_session_id"] = self.identity.recording_id
        return [_with_audio_data(event, b"".join(self._audio))]

    def _closed_events(self, ending: Ending, now: Moment) -> list[bytes]:
        match ending.end:
            case End.ANSWERED | End.GONE | End.TOO_BIG | End.TOO_SLOW | End.CLIENT:
                return []
            case End.SHUTDOWN:
                return [self.error(ErrorCode.SERVICE_UNAVAILABLE, "Server is shutting down", now)]
            case _:
                message = ending.message or "the worker was lost"
                return [self.error(ErrorCode.INFERENCE_ERROR, message, now)]

    def error(
        self, code: ErrorCode, message: str, now: Moment, input_id: str | None = None
    ) -> bytes:
        """Render an `error` event; the dialect has no codes, and no names of inputs."""
        del code, now, input_id
        return _event("error", error=message)


def _event(kind: str, **fields: object) -> bytes:
    return orjson.dumps({"type": kind, **fields})


def _with_audio_data(event: dict[str, object], pcm: bytes) -> bytes:
    if pcm:
        return with_audio(event, pcm, "audio_data")
    return orjson.dumps({**event, "audio_data": None})
