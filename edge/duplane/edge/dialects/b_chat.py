"""Dialect B in mode=chat: several turns on one connection, each ended by `response.done`."""

from __future__ import annotations

from typing import ClassVar

import orjson

from duplane.edge.dialects.b import APPEND, DialectB
from duplane.edge.dialects.b_metrics import BACKEND, Usage, stage_metrics
from duplane.edge.dialects.chat import ChatDialect
from duplane.edge.dialects.chat_request import ChatDefaults, read_turn
from duplane.edge.dialects.dialect import (
    WAITING,
    Action,
    Answers,
    Configure,
    Moment,
    Phase,
    ServerEvents,
    Transitions,
    Turn,
    queue_events,
    with_audio,
)
from duplane.edge.dialects.fields import Fields, ignored
from duplane.edge.faults import ErrorCode
from duplane.fabric.v1 import session_pb2

DEFAULTS = ChatDefaults(max_new_token_count=256, length_penalty=1.1, is_spoken=False)
# `reason` has one value in the protocol; this is why, beside it.
FINISH_REASONS = {
    session_pb2.FINISH_REASON_LENGTH: "length",
    session_pb2.FINISH_REASON_CONTEXT_FULL: "context_full",
}


class DialectBChat(ChatDialect, DialectB):
    """One client that chats in B. The history comes anew with every turn."""

    request_path: ClassVar[str] = "input."
    backend_mode: ClassVar[str] = "turn_based"
    transitions: ClassVar[Transitions] = {
        **DialectB.transitions,
        (Phase.START, APPEND): Phase.OPENING,  # implies an empty `session.init`
    }
    answers: ClassVar[Answers] = {
        **DialectB.answers,
        APPEND: ("response.output.delta", "response.done"),
    }
    server_events: ClassVar[ServerEvents] = {
        **DialectB.server_events,
        **queue_events("session.", WAITING | {Phase.ACTIVE}),  # for each turn
        "response.done": frozenset({Phase.ACTIVE}),
    }
    _response_id = ""

    def _read(self, kind: str, event: Fields) -> Action:
        """Check settings as they are where units flow; a turn brings its own, so none counts."""
        action = super()._read(kind, event)
        if isinstance(action, Configure):
            payload = event.required_fields("payload")
            self._ignored = [*ignored(payload)]
        return action

    def _read_append(self, given: Fields) -> Turn:
        return read_turn(given, DEFAULTS, self.limits)

    def begin(self, turn: Turn) -> None:
        """Begin to answer a turn under an id of its own."""
        super().begin(turn)
        self._response_id = f"resp_{self._new_id()}"

    def _reply(self, kind: str, now: Moment) -> dict[str, object]:
        event = self._event(kind, now)
        event["response_id"] = self._response_id
        if self._turn.input_id is not None:
            event["input_id"] = self._turn.input_id
        return event

    def _piece_events(self, delta: session_pb2.ChatDelta, now: Moment) -> list[bytes]:
        event = self._reply("response.output.delta", now)
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
        """Render `response.done`; of an answer that was not streamed, its audio before it."""
        used = Usage.of_unit(done.token_counts)
        self._usage.add(used)
        audio = b"".join(self._audio)
        event = self._reply("response.done", now)
        event |= {
            "text": "".join(self._text),
            "reason": "turn_end",
            "metrics": {
                "backend": BACKEND,
                "kv_cache_length": self._prompt_token_count
                + done.token_counts.output_text_token_count,
                "n_tokens": done.token_counts.output_text_token_count,
                "n_tts_tokens": done.token_counts.output_audio_token_count,
            },
            "usage": used.to_json(),
        }
        if self._turn.ignored_fields:
            event["ignored_fields"] = self._turn.ignored_fields
        if (reason := FINISH_REASONS.get(done.reason)) is not None:
            event["finish_reason"] = reason
        if not audio:
            return [orjson.dumps(event)]
        spoken = self._reply("response.output.delta", now)
        spoken |= {"kind": "audio", "metrics": {"backend": BACKEND}}
        return [with_audio(spoken, audio), with_audio(event, audio)]

    def refused(self, code: ErrorCode, message: str, now: Moment) -> list[bytes]:
        """Render an `error` that names the input it is about, if that has a name."""
        return [self.error(code, message, now, self._turn.input_id)]
