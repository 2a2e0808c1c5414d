"""What both kinds of sessions of dialect E share: the settings, the items, errors, and the end."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from typing import ClassVar

from duplane.edge.client_errors import ErrorCode
from duplane.edge.clock import Moment
from duplane.edge.close import SESSION_OVER, Close, CloseReason
from duplane.edge.dialects.actions import Append, Command
from duplane.edge.dialects.dialect import Decoders, Replies
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
    CreateItem,
    ItemCommand,
    Truncate,
    Update,
    command_decoders,
)
from duplane.edge.dialects.e_conversation import Conversation
from duplane.edge.dialects.e_response import FULL, TURN_DETECTED, End, Status
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
from duplane.edge.speech.scorers import ScorerFactory
from duplane.edge.speech.spectral_scorer import SpectralScorer

ITEM_ADDED = ("conversation.item.added", "conversation.item.done")
BEGIN = ("response.created", "response.done")
SPEECH = (
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
COMMANDS = (
    *(UPDATE, COMMIT, CLEAR, CREATE_ITEM, RETRIEVE, DELETE, TRUNCATE),
    *(CREATE_RESPONSE, CANCEL, CLEAR_OUTPUT),
)
ANSWERS: Replies = {
    UPDATE: ("session.updated",),
    COMMIT: ("input_audio_buffer.committed", *ITEM_ADDED),
    CLEAR: ("input_audio_buffer.cleared",),
    CREATE_ITEM: ITEM_ADDED,
    RETRIEVE: ("conversation.item.retrieved",),
    DELETE: ("conversation.item.deleted",),
    TRUNCATE: ("conversation.item.truncated",),
    CREATE_RESPONSE: BEGIN,
    CANCEL: (*SPEECH[6:], "response.done"),
    CLEAR_OUTPUT: (),
}

# The error of a session that ends for one of these reasons.
_ERRORS: Mapping[CloseReason, tuple[str, str]] = {
    CloseReason.TIMEOUT: SESSION_EXPIRED,
    CloseReason.CONTEXT_FULL: CONTEXT_TOO_LONG,
    CloseReason.SHUTDOWN: SERVER_SHUTDOWN,
    CloseReason.FAILED: SERVER_ERROR,
}
_EXPIRED = "Your session hit the maximum duration of {:g} minutes."
_EXPIRED_CODE = 1001  # after which a client begins a new session


class RealtimeDialect(OpenAIDialect, ABC):
    """One client that speaks E."""

    name: ClassVar[str] = "E"

    new_scorer: ScorerFactory = SpectralScorer  # for the detection of turns
    _fixed: frozenset[str] = frozenset()  # the settings that do not change any more

    def __init__(
        self,
        identity: Identity,
        limits: Limits,
        mode: Mode,
        conversation: Conversation | None = None,
    ) -> None:
        """Begin a session, or continue with the `conversation` of a session before it."""
        super().__init__(identity, limits, mode)
        self._is_greeted = conversation is not None
        self._conversation = conversation or Conversation(identity)
        self._use_formats()

    def _use_formats(self) -> None:
        """Read and write sound as the settings say."""
        settings = self._conversation.settings
        self.input_sound, self.output_sound = settings.input_sound, settings.output_sound

    # --- client events ---

    def _event_decoders(self) -> Decoders:
        return {APPEND: self._decode_append, **command_decoders(self.limits, self._input_id)}

    def _decode_append(self, event: Fields) -> Append:
        if not event.get("audio", BASE64, required=True):  # an error would end some clients
            rate_hertz = self.input_sound.rate_hertz
            return Append(b"", kind=APPEND, rate_hertz=rate_hertz, rest=self._begun)
        return self._decode_sound(event)

    def answer(self, command: Command, now: Moment) -> list[bytes]:
        """Apply a command that means the same for both kinds of sessions, and render its answer."""
        match command:
            case Update():
                return [self._update(command, now)]
            case CreateItem() | ItemCommand() | Truncate():
                return self._conversation.change_items(command)
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
        """Change the settings that are not fixed."""
        event = self._conversation.update(command, self._expires_at(now), self._fixed)
        self._use_formats()
        return event

    # --- server events ---

    def connected(self, now: Moment) -> list[bytes]:
        """Render the description of the session: clients wait for it before they say anything."""
        return [] if self._is_greeted else [self._conversation.created(self._expires_at(now))]

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
