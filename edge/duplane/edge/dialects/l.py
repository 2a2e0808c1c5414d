"""Dialect L, OpenAI's Live protocol: continuous sound in both directions, without turns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import orjson

from duplane.edge.client_errors import ClientError, ErrorCode
from duplane.edge.clock import Moment
from duplane.edge.close import Close, CloseReason
from duplane.edge.dialects.actions import (
    Action,
    Append,
    Command,
    Configure,
    Dropped,
    Leave,
    Speak,
    SpeechEnding,
    Tag,
)
from duplane.edge.dialects.continuous_sound import ContinuousSound
from duplane.edge.dialects.dialect import (
    ALIVE,
    Decoders,
    Phase,
    Replies,
    ServerEvents,
    Transitions,
    with_audio,
)
from duplane.edge.dialects.duplex import DuplexDialect
from duplane.edge.dialects.l_settings import Configuration, read_configuration
from duplane.edge.dialects.openai_dialect import OpenAIDialect
from duplane.edge.dialects.openai_errors import CONTEXT_FULL, SERVER_ERROR, error_fields
from duplane.edge.dialects.openai_settings import DEFAULT_VOICE
from duplane.edge.dialects.openai_sound import DEFAULT_FORMAT, format_fields
from duplane.edge.dialects.speech import read_speech_text
from duplane.edge.identity import Identity
from duplane.edge.modes import Mode
from duplane.edge.payload.fields import Fields
from duplane.edge.settings import Limits
from duplane.fabric.model import ModelFormat
from duplane.fabric.v1 import session_pb2

START = "session.start"
APPEND = "session.input_audio.append"
MUTE = "session.input_audio.mute"
UNMUTE = "session.input_audio.unmute"
UPDATE = "session.update"
CLOSE = "session.close"
COMMENTARY = "session.commentary.append"

# Events for abilities that the model lacks. Clients go on after the error that answers them.
UNSUPPORTED = frozenset(
    {
        "session.instructions.append",
        "session.thinking.append",
        "session.output_audio.fixture.play",
        "response.item.create",
        "response.create",
        "decision.create",
        "decision.item.create",
        "decision.item.delete",
        "transport.dtmf.send",
    }
)

_ANSWERS = {
    MUTE: "session.input_audio.muted",
    UNMUTE: "session.input_audio.unmuted",
    UPDATE: "session.updated",
}
_CLOSED_REASONS: Mapping[CloseReason, str] = {
    CloseReason.CLIENT: "close_requested",
    CloseReason.TIMEOUT: "expired",
    CloseReason.CONTEXT_FULL: "expired",
    CloseReason.SHUTDOWN: "connection_lost",
    CloseReason.FAILED: "connection_lost",
}
_BEGUN = frozenset({Phase.OPENING, Phase.ACTIVE})


class DialectL(OpenAIDialect, DuplexDialect):
    """One client that speaks L. Each unit is one `session.output_audio.delta`, also of silence."""

    name: ClassVar[str] = "L"
    lost_while_opening: ClassVar[CloseReason] = CloseReason.WORKER_CONNECT_FAILED
    unsupported: ClassVar[ErrorCode] = ErrorCode.UNSUPPORTED
    transitions: ClassVar[Transitions] = {
        (Phase.START, START): Phase.OPENING,
        (Phase.START, CLOSE): Phase.CLOSED,
        (Phase.OPENING, APPEND): Phase.OPENING,  # the audio waits until the conversation is ready
        (Phase.OPENING, MUTE): Phase.OPENING,
        (Phase.OPENING, UNMUTE): Phase.OPENING,
        (Phase.OPENING, CLOSE): Phase.CLOSED,
        (Phase.ACTIVE, APPEND): Phase.ACTIVE,
        (Phase.ACTIVE, MUTE): Phase.ACTIVE,
        (Phase.ACTIVE, UNMUTE): Phase.ACTIVE,
        (Phase.ACTIVE, UPDATE): Phase.ACTIVE,
        (Phase.ACTIVE, COMMENTARY): Phase.ACTIVE,
        (Phase.ACTIVE, CLOSE): Phase.CLOSED,
    }
    replies: ClassVar[Replies] = {
        START: ("session.started",),
        APPEND: (
            "session.output_transcript.delta",
            "session.output_audio.delta",
            "session.usage.updated",
        ),
        **{command: (answer,) for command, answer in _ANSWERS.items()},
        COMMENTARY: ("session.commentary.appended",),
        CLOSE: ("session.closed",),
    }
    server_events: ClassVar[ServerEvents] = {
        "session.started": frozenset({Phase.OPENING}),
        "session.updated": frozenset({Phase.ACTIVE}),
        "session.commentary.appended": frozenset({Phase.ACTIVE}),
        "session.output_transcript.delta": frozenset({Phase.ACTIVE}),
        "session.output_audio.delta": frozenset({Phase.ACTIVE}),
        "session.usage.updated": frozenset({Phase.ACTIVE}),
        "session.input_audio.muted": _BEGUN,
        "session.input_audio.unmuted": _BEGUN,
        "session.closed": ALIVE,
        "error": ALIVE,
    }

    _has_spoken = False

    def __init__(self, identity: Identity, limits: Limits, mode: Mode) -> None:
        super().__init__(identity, limits, mode)
        self._speech = ContinuousSound(DEFAULT_FORMAT, ModelFormat())
        self._is_muted = False
        self._start_id: str | None = None  # the client's id of `session.start`
        self._close_id: str | None = None  # the client's id of `session.close`
        self._resource: dict[str, object] = {
            "model": "",
            "audio": {
                "format": format_fields(DEFAULT_FORMAT),
                "output": {"voice": DEFAULT_VOICE.to_json()},
            },
        }
        self._context_token_limit = 0  # 0 if unknown
        self._separator = ""  # of the next text from the text before: a client joins all texts
        self._event_count = 0

    # --- client events ---

    def _refusal(self, kind: str, phase: Phase) -> ClientError:
        if kind in UNSUPPORTED:
            return ClientError(ErrorCode.UNSUPPORTED, f"type: {kind} is not supported")
        if kind in (UPDATE, COMMENTARY) and phase is Phase.OPENING:
            return ClientError(ErrorCode.NOT_READY, f"type: {kind} before session.started")
        return super()._refusal(kind, phase)

    def _event_decoders(self) -> Decoders:
        return {
            APPEND: self._decode_append,
            START: self._decode_start,
            COMMENTARY: self._decode_commentary,
            CLOSE: lambda event: Leave(kind=CLOSE, input_id=self._input_id(event)),
            **dict.fromkeys(_ANSWERS, self._decode_command),
        }

    def _decode_start(self, event: Fields) -> Configuration:
        session = event.required_fields("session")
        return read_configuration(session, self.limits, START, self._input_id(event))

    def _decode_commentary(self, event: Fields) -> Speak:
        """Decode a text that the model must speak.

        Its `delegation_id` has no effect: the model delegates no tasks.
        """
        return Speak(read_speech_text(event, "content"), COMMENTARY, self._input_id(event))

    def _decode_command(self, event: Fields) -> Command:
        return Command(event.get("type", str, required=True), self._input_id(event))

    def _decode_append(self, event: Fields) -> Append:
        return self._decode_sound(event, is_muted=self._is_muted)

    def accept(self, action: Action) -> None:
        """Apply a decoded event, except an append. Call this before the next event is decoded."""
        super().accept(action)
        if isinstance(action, Command) and action.kind != UPDATE:
            self._is_muted = action.kind == MUTE
        elif isinstance(action, Leave):
            self._close_id = action.input_id

    def _configure(self, settings: Configure) -> None:
        super()._configure(settings)
        self._start_id = settings.input_id
        if isinstance(settings, Configuration):
            self.input_sound = self.output_sound = settings.sound
            self._resource = dict(settings.resource)

    def answer(self, command: Command, now: Moment) -> list[bytes]:
        """Render the answer to a command."""
        fields = {"session": self._session(now)} if command.kind == UPDATE else {}
        return [self._event(_ANSWERS[command.kind], fields, command.input_id)]

    # --- server events ---

    def use_model(self, model: ModelFormat, name: str = "") -> None:
        """Prepare to render the speech of a model. Call this before the first event about it."""
        super().use_model(model, name)
        self._speech = ContinuousSound(self.output_sound, model)

    def _opened_events(self, opened: session_pb2.Opened, now: Moment) -> list[bytes]:
        self._context_token_limit = opened.context_token_limit
        return [self._event("session.started", {"session": self._session(now)}, self._start_id)]

    def delta(
        self, delta: session_pb2.Delta, tag: Tag, dropped: Dropped, now: Moment
    ) -> list[bytes]:
        """Render a unit: its text if it has one, its sound, and how much the session has used."""
        del tag, dropped, now
        speech = self._speech
        begin_ms = speech.sent_ms
        audio = speech.next_unit(delta.speech.audio)
        time = {"start_ms": begin_ms, "end_ms": speech.sent_ms}
        events: list[bytes] = []
        if text := delta.speech.text:
            text, self._separator = f"{self._separator}{text}", ""
            events.append(self._event("session.output_transcript.delta", {"delta": text, **time}))
            self._has_spoken = True
        if delta.end_of_turn and self._has_spoken:
            self._separator = " "
        if audio:
            kind = {"type": "session.output_audio.delta"}
            events.append(with_audio({**kind, **time}, audio, "delta"))
        fields: dict[str, object] = {"usage": self._usage()}
        if limit := self._context_token_limit:
            fields["context_window"] = {"usage_ratio": round(delta.context_token_count / limit, 4)}
        events.append(self._event("session.usage.updated", fields))
        return events

    def speech_added(self, speak: Speak, now: Moment) -> list[bytes]:
        """Render that a commentary is added at this moment of the session."""
        del now
        moment_ms = self._speech.sent_ms
        time = {"start_ms": moment_ms, "end_ms": moment_ms}
        return [self._event("session.commentary.appended", time, speak.input_id)]

    def speech_ended(
        self, speak: Speak, ending: SpeechEnding, message: str, now: Moment
    ) -> list[bytes]:
        """Render an error if a commentary was refused; L has no event for other ends."""
        if ending is not SpeechEnding.REFUSED:
            return []
        return [self.error(ErrorCode.INVALID_PAYLOAD, f"content: {message}", now, speak.input_id)]

    def _usage(self) -> dict[str, object]:
        return {"seconds": self._speech.sent_ms / 1e3}

    def _session(self, now: Moment) -> dict[str, object]:
        """Return the description of the session."""
        return {
            "id": self.identity.session_id,
            "expires_at": self._expires_at(now),
            "status": "active",
            **self._resource,
            "delegation": {"type": "client"},
            "store": bool(self.identity.recording_id),
        }

    def _closed_events(self, close: Close, now: Moment) -> list[bytes]:
        reason = _CLOSED_REASONS.get(close.reason)
        if reason is None:
            return []
        events: list[bytes] = []
        if close.reason in (CloseReason.FAILED, CloseReason.CONTEXT_FULL):
            is_full = close.reason is CloseReason.CONTEXT_FULL
            kind, code = CONTEXT_FULL if is_full else SERVER_ERROR
            error = {"type": kind, "code": code, "message": close.text}
            events.append(self._event("error", {"error": error}))
        fields = {"reason": reason, "session": self._session(now), "usage": self._usage()}
        return [*events, self._event("session.closed", fields, self._close_id)]

    def error(
        self, code: ErrorCode, message: str, now: Moment, input_id: str | None = None
    ) -> bytes:
        """Render an `error` event."""
        del now
        error = error_fields(code, message)
        if input_id is not None:
            error["client_event_id"] = input_id
        return self._event("error", {"error": error}, input_id)

    def _event(
        self, kind: str, fields: Mapping[str, object], client_event_id: str | None = None
    ) -> bytes:
        """Render an event. `client_event_id` is the client's id of the event that caused it."""
        self._event_count += 1
        event: dict[str, object] = {"type": kind, "event_id": f"event_{self._event_count}"}
        if client_event_id is not None:
            event["client_event_id"] = client_event_id
        return orjson.dumps({**event, **fields})
