"""Dialect B in mode=chat: several turns on one connection. `response.done` ends each turn."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import ClassVar

import orjson

from duplane.edge.client_errors import ErrorCode
from duplane.edge.clock import Moment
from duplane.edge.close import Close
from duplane.edge.dialects.actions import Configure, Leave, Turn
from duplane.edge.dialects.b_events import (
    APPEND,
    CLOSE,
    INIT,
    TRANSITIONS,
    BEvents,
    read_close,
    read_input_id,
)
from duplane.edge.dialects.b_settings import read_settings
from duplane.edge.dialects.chat import ChatDialect
from duplane.edge.dialects.chat_request import ChatDefaults, read_turn
from duplane.edge.dialects.dialect import (
    ALIVE,
    WAITING,
    Decoders,
    Phase,
    Replies,
    ServerEvents,
    Transitions,
    queue_events,
    with_audio,
)
from duplane.edge.dialects.resumption import refuse_resumable
from duplane.edge.dialects.unit_metrics import BACKEND, Usage, stage_metrics
from duplane.edge.identity import Identity
from duplane.edge.modes import Mode
from duplane.edge.payload.fields import Fields, ignored
from duplane.edge.settings import Limits
from duplane.fabric.v1 import session_pb2

DEFAULTS = ChatDefaults(max_new_token_count=256, length_penalty=1.1, generates_audio=False)
# The protocol's field `reason` has only one value. So `finish_reason` is added: it says why an
# answer was cut off.
FINISH_REASONS: Mapping[int, str] = {
    session_pb2.FINISH_REASON_LENGTH: "length",
    session_pb2.FINISH_REASON_CONTEXT_FULL: "context_full",
}


_MODES = frozenset({"chat", "turn_based"})  # values that agree with the URL


class DialectBChat(ChatDialect):
    """One client that chats in B. Every turn contains the whole history."""

    name: ClassVar[str] = "B"
    request_path: ClassVar[str] = "input."
    transitions: ClassVar[Transitions] = {
        **TRANSITIONS,
        (Phase.START, APPEND): Phase.OPENING,  # the append implies an empty `session.init`
    }
    replies: ClassVar[Replies] = {
        INIT: ("session.created",),
        APPEND: ("response.output.delta", "response.done"),
        CLOSE: ("session.closed",),
    }
    server_events: ClassVar[ServerEvents] = {
        **queue_events("session.", WAITING | {Phase.ACTIVE}),  # for each turn
        "session.created": frozenset({Phase.OPENING}),
        "response.output.delta": frozenset({Phase.ACTIVE}),
        "session.closed": ALIVE,
        "error": ALIVE,
        "response.done": frozenset({Phase.ACTIVE}),
    }

    def __init__(
        self,
        identity: Identity,
        limits: Limits,
        mode: Mode,
        new_id: Callable[[], str] = lambda: secrets.token_hex(6),
    ) -> None:
        super().__init__(identity, limits, mode)
        self._events = BEvents(identity, "turn_based")
        self._new_id = new_id
        self._response_id = ""

    # --- client events ---

    def _input_id(self, event: Fields) -> str | None:
        return read_input_id(event, self.limits)

    def _event_decoders(self) -> Decoders:
        return {
            APPEND: self._decode_turn,
            INIT: self._decode_settings,
            CLOSE: self._decode_close,
        }

    def _decode_turn(self, event: Fields) -> Turn:
        return read_turn(event.required_fields("input"), DEFAULTS, self.limits, APPEND)

    def _decode_close(self, event: Fields) -> Leave:
        return read_close(event, self.limits)

    def _decode_settings(self, event: Fields) -> Configure:
        """Check settings as in a duplex session.

        These settings have no effect, because each turn has its own.
        """
        refuse_resumable(event.required_fields("payload"))
        settings, *_ = read_settings(event.required_fields("payload"), self.limits, _MODES)
        # `unread` is a second `Fields` object in which the fields still count as unused.
        unread = event.required_fields("payload")
        unread.expect("mode", _MODES)
        return Configure(settings, ignored=ignored(unread), kind=INIT)

    # --- server events ---

    def _opened_events(self, opened: session_pb2.Opened, now: Moment) -> list[bytes]:
        ignored_fields = [*self._ignored, *opened.ignored_fields]
        return self._events.created(
            opened.prompt_token_count, ignored_fields, self._model_fields, now
        )

    def begin(self, turn: Turn, now: Moment) -> None:
        """Begin to answer a turn, under a new response id."""
        super().begin(turn, now)
        self._response_id = f"resp_{self._new_id()}"

    def _response_event(self, kind: str, now: Moment) -> dict[str, object]:
        event = self._events.envelope(kind, now)
        event["response_id"] = self._response_id
        if self._turn.input_id is not None:
            event["input_id"] = self._turn.input_id
        return event

    def _delta_events(self, delta: session_pb2.ChatDelta, now: Moment) -> list[bytes]:
        event = self._response_event("response.output.delta", now)
        metrics: dict[str, object] = {"backend": BACKEND, **stage_metrics(delta.stage_times)}
        if delta.context_token_count:
            metrics["kv_cache_length"] = delta.context_token_count
        event["metrics"] = metrics
        events: list[bytes] = []
        if delta.text:
            events.append(orjson.dumps({**event, "kind": "text", "text": delta.text}))
        if delta.audio:
            events.append(with_audio({**event, "kind": "audio"}, delta.audio))
        return events

    def done(self, done: session_pb2.Done, now: Moment) -> list[bytes]:
        """Render `response.done`, after the audio if the answer was not streamed."""
        used = Usage.of_unit(done.token_counts)
        self._events.usage.add(used)
        audio = b"".join(self._audio)
        event = self._response_event("response.done", now)
        event |= {
            "text": "".join(self._text),
            "reason": "turn_end",
            "metrics": {
                "backend": BACKEND,
                "kv_cache_length": self._final_token_count(done),
                "n_tokens": done.token_counts.output_text_token_count,
                "n_tts_tokens": done.token_counts.output_audio_token_count,
            },
            "usage": used.to_json(),
        }
        if ignored_fields := self._without_effect():
            event["ignored_fields"] = ignored_fields
        if (reason := FINISH_REASONS.get(done.reason)) is not None:
            event["finish_reason"] = reason
        if not audio:
            return [orjson.dumps(event)]
        audio_event = self._response_event("response.output.delta", now)
        audio_event |= {"kind": "audio", "metrics": {"backend": BACKEND}}
        return [with_audio(audio_event, audio), with_audio(event, audio)]

    def refused(self, code: ErrorCode, message: str, now: Moment) -> list[bytes]:
        """Render an `error` with the id of the refused input, if it has one."""
        return [self.error(code, message, now, self._turn.input_id)]

    def _closed_events(self, close: Close, now: Moment) -> list[bytes]:
        return self._events.closed(close, now)

    def error(
        self, code: ErrorCode, message: str, now: Moment, input_id: str | None = None
    ) -> bytes:
        """Render an `error` event."""
        return self._events.error(code, message, now, input_id)
