"""Dialect E, OpenAI's Realtime protocol: items and responses, on a conversation without turns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from duplane.edge.client_errors import ErrorCode
from duplane.edge.clock import Moment
from duplane.edge.close import SESSION_OVER, Close, CloseReason
from duplane.edge.dialects.actions import Append, Command, Dropped, Tag
from duplane.edge.dialects.dialect import (
    ALIVE,
    Decoders,
    Phase,
    Replies,
    ServerEvents,
    Transitions,
)
from duplane.edge.dialects.e_commands import (
    APPEND,
    CANCEL,
    CLEAR,
    CLEAR_OUTPUT,
    COMMIT,
    CREATE_ITEM,
    CREATE_RESPONSE,
    DELETE,
    RETRIEVE,
    TRUNCATE,
    UPDATE,
    Cancel,
    CreateItem,
    CreateResponse,
    ItemCommand,
    Truncate,
    Update,
    command_decoders,
)
from duplane.edge.dialects.e_conversation import Conversation
from duplane.edge.dialects.e_response import (
    CLIENT_CANCELLED,
    COMPLETED,
    FULL,
    TURN_DETECTED,
    End,
    Status,
)
from duplane.edge.dialects.e_settings import FIXED_BY_OPENING, FIXED_BY_SOUND
from duplane.edge.dialects.openai_dialect import OpenAIDialect
from duplane.edge.dialects.openai_errors import (
    CONTEXT_TOO_LONG,
    SERVER_ERROR,
    SERVER_SHUTDOWN,
    SESSION_EXPIRED,
    error_fields,
    named_error,
)
from duplane.edge.identity import Identity
from duplane.edge.modes import Mode
from duplane.edge.payload.fields import BASE64, Fields
from duplane.edge.settings import Limits
from duplane.fabric.v1 import session_pb2

ITEM_ADDED = ("conversation.item.added", "conversation.item.done")
_BEGIN = ("response.created", "response.done")
_SPEECH = (
    "response.output_item.added",
    "conversation.item.added",
    "response.content_part.added",
    "response.output_audio_transcript.delta",
    "response.output_audio.delta",
    "response.output_text.delta",
    "response.output_audio.done",
    "response.output_audio_transcript.done",
    "response.output_text.done",
    "response.content_part.done",
    "conversation.item.done",
    "response.output_item.done",
)
_PHASES = (Phase.START, Phase.OPENING, Phase.ACTIVE)
_COMMANDS = (
    *(UPDATE, COMMIT, CLEAR, CREATE_ITEM, RETRIEVE, DELETE, TRUNCATE),
    *(CREATE_RESPONSE, CANCEL, CLEAR_OUTPUT),
)
_SPEAKING = frozenset({Phase.ACTIVE})

# The error of a session that ends for one of these reasons.
_ERRORS: Mapping[CloseReason, tuple[str, str]] = {
    CloseReason.TIMEOUT: SESSION_EXPIRED,
    CloseReason.CONTEXT_FULL: CONTEXT_TOO_LONG,
    CloseReason.SHUTDOWN: SERVER_SHUTDOWN,
    CloseReason.FAILED: SERVER_ERROR,
}
_EXPIRED = "Your session hit the maximum duration of {:g} minutes."
_EXPIRED_CODE = 1001  # after which a client begins a new session


class DialectE(OpenAIDialect):
    """One client that speaks E. A response is one turn of the model."""

    name: ClassVar[str] = "E"
    lost_while_opening: ClassVar[CloseReason] = CloseReason.WORKER_CONNECT_FAILED
    # Clients send their settings and the items of an earlier session in several events.
    grace_s: ClassVar[float] = 0.25
    settling: ClassVar[frozenset[str]] = frozenset({UPDATE, CREATE_ITEM, DELETE})
    transitions: ClassVar[Transitions] = {
        (Phase.START, APPEND): Phase.OPENING,
        (Phase.OPENING, APPEND): Phase.OPENING,  # the audio waits until the conversation is ready
        (Phase.ACTIVE, APPEND): Phase.ACTIVE,
        **{(phase, command): phase for command in _COMMANDS for phase in _PHASES},
    }
    replies: ClassVar[Replies] = {
        APPEND: ("response.created", *_SPEECH, "response.done"),
        UPDATE: ("session.updated",),
        COMMIT: ("input_audio_buffer.committed", *ITEM_ADDED),
        CLEAR: ("input_audio_buffer.cleared",),
        CREATE_ITEM: ITEM_ADDED,
        RETRIEVE: ("conversation.item.retrieved",),
        DELETE: ("conversation.item.deleted",),
        TRUNCATE: ("conversation.item.truncated",),
        CREATE_RESPONSE: _BEGIN,
        CANCEL: (*_SPEECH[6:], "response.done"),
        CLEAR_OUTPUT: (),
    }
    server_events: ClassVar[ServerEvents] = {
        "session.created": frozenset({Phase.START}),
        "session.updated": ALIVE,
        "input_audio_buffer.committed": ALIVE,
        "input_audio_buffer.cleared": ALIVE,
        "conversation.item.added": ALIVE,
        "conversation.item.done": ALIVE,
        "conversation.item.retrieved": ALIVE,
        "conversation.item.deleted": ALIVE,
        "conversation.item.truncated": ALIVE,
        "response.created": ALIVE,
        **dict.fromkeys((kind for kind in _SPEECH if kind not in ITEM_ADDED), _SPEAKING),
        "response.done": ALIVE,
        "error": ALIVE,
    }

    def __init__(self, identity: Identity, limits: Limits, mode: Mode) -> None:
        super().__init__(identity, limits, mode)
        self._conversation = Conversation(identity)
        self._is_muted = False  # what the model says is dropped until its turn ends
        self._fixed = FIXED_BY_SOUND  # the settings that the first append fixes

    # --- client events ---

    def _event_decoders(self) -> Decoders:
        return {APPEND: self._decode_append, **command_decoders(self.limits, self._input_id)}

    def _decode_append(self, event: Fields) -> Append:
        if not event.get("audio", BASE64, required=True):  # an error would end some clients
            return Append(b"", kind=APPEND, rest=self._begun)
        return self._decode_sound(event)

    def open_settings(self) -> session_pb2.Open:
        """Return the settings of the conversation, with the items so far in its prompt."""
        self._fixed = FIXED_BY_OPENING
        conversation = self._conversation
        return conversation.settings.to_open(tuple(conversation.items), self.limits)

    def setting_path(self, field: str) -> str:
        """Return the path of a settings field in the client's event."""
        return "session.instructions" if field == "system_prompt" else super().setting_path(field)

    def answer(self, command: Command, now: Moment) -> list[bytes]:
        """Apply a command, and render its answer."""
        conversation = self._conversation
        match command:
            case Update():
                return [self._update(command, now)]
            case CreateItem() | ItemCommand() | Truncate():
                return conversation.change_items(command)
            case CreateResponse():
                if conversation.response:
                    return [conversation.already_active(command.input_id)]
                return conversation.empty_response(command.request)
            case Cancel():
                return self._cancel(command)
            case _:
                return self._answer_buffer(command)

    def _answer_buffer(self, command: Command) -> list[bytes]:
        """Answer a command about the sound that the client has sent, or that it gets."""
        match command.kind:
            case "input_audio_buffer.commit":
                return self._conversation.commit()
            case "input_audio_buffer.clear":
                self._begun = b""
                return [self._conversation.events.event("input_audio_buffer.cleared", {})]
            case _:
                return []

    def _update(self, command: Update, now: Moment) -> bytes:
        fixed = self._fixed if self.phase is not Phase.START else frozenset[str]()
        event = self._conversation.update(command, self._expires_at(now), fixed)
        settings = self._conversation.settings
        self.input_sound, self.output_sound = settings.input_sound, settings.output_sound
        return event

    def _cancel(self, command: Cancel) -> list[bytes]:
        """End the open response now: drop its rest, and make the model listen."""
        conversation = self._conversation
        response = conversation.response
        if response is None or command.response_id not in (None, response.id):
            return [conversation.not_active(command.input_id)]
        self._is_muted = self.must_listen = True
        return conversation.end_response(CLIENT_CANCELLED)

    # --- server events ---

    def connected(self, now: Moment) -> list[bytes]:
        """Render the description of the session: clients wait for it before they say anything."""
        return [self._conversation.created(self._expires_at(now))]

    def delta(
        self, delta: session_pb2.Delta, tag: Tag, dropped: Dropped, now: Moment
    ) -> list[bytes]:
        """Render a unit: the text and the sound of a response, and its end; nothing if none is."""
        del tag, dropped, now
        conversation = self._conversation
        conversation.usage.add(delta.token_counts)
        is_speech = delta.HasField("speech")
        audio = self._speech_audio(delta)
        if self._is_muted:
            self._is_muted = is_speech and not delta.end_of_turn
            return []
        events: list[bytes] = []
        text = delta.speech.text
        if is_speech and (text or audio):
            if conversation.response is None:
                events += conversation.begin_response()
            if response := conversation.response:
                events += response.add(text, self.output_sound.encode(audio) if audio else b"")
        if delta.end_of_turn and not delta.interrupted_turn:
            events += conversation.end_response(COMPLETED)
        elif not is_speech:
            events += conversation.end_response(TURN_DETECTED)
        return events

    def failed(
        self, failed: session_pb2.Failed, now: Moment, input_id: str | None = None
    ) -> list[bytes]:
        """Treat a unit that failed as one in which the model listened: an error ends clients."""
        del failed, now, input_id
        self._is_muted = False
        return self._conversation.end_response(TURN_DETECTED)

    def ended(self, close: Close, now: Moment) -> list[bytes]:
        """Render the end of the open response, and the error that says why the session ends."""
        is_told = close.reason in self.refusals or close.reason in _ERRORS
        events = self._conversation.end_response(self._end_of(close)) if is_told else []
        return events + super().ended(close, now)

    def _end_of(self, close: Close) -> End:
        """Return how a response ends with its session."""
        if close.reason is CloseReason.CONTEXT_FULL:
            return FULL
        if close.reason is CloseReason.FAILED:
            return End(Status.FAILED, error=named_error(SERVER_ERROR, close.text))
        return TURN_DETECTED

    def _closed_events(self, close: Close, now: Moment) -> list[bytes]:
        del now
        error = _ERRORS.get(close.reason)
        if error is None:
            return []
        message = close.text
        if close == SESSION_OVER:
            message = _EXPIRED.format((self.limits.session_s or self.mode.session_s) / 60)
        return [self._conversation.events.error(named_error(error, message))]

    def close_code(self, close: Close) -> int:
        """Return the WebSocket close code."""
        return _EXPIRED_CODE if close == SESSION_OVER else super().close_code(close)

    def error(
        self, code: ErrorCode, message: str, now: Moment, input_id: str | None = None
    ) -> bytes:
        """Render an `error` event."""
        del now
        return self._conversation.events.error(error_fields(code, message), input_id=input_id)
