"""Base class of all dialects: tables of legal events, decoding, queue events, errors, closing.

`decode` reads a client event and changes nothing; `accept` applies it. A dialect uses no sockets
and no timers, and does not decide when an event is sent: the session does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from enum import Enum, auto
from types import MappingProxyType
from typing import ClassVar

import orjson
import pybase64

from duplane.edge.client_errors import ClientError, ErrorCode
from duplane.edge.clock import Moment
from duplane.edge.close import CLOSE_CODES, REFUSALS, Close, CloseReason
from duplane.edge.dialects.actions import Action, Configure
from duplane.edge.identity import Identity
from duplane.edge.modes import Mode
from duplane.edge.payload.fields import Fields
from duplane.edge.payload.sound_format import INPUT_SOUND, OUTPUT_SOUND, SoundFormat
from duplane.edge.settings import Limits
from duplane.fabric.durations import to_seconds
from duplane.fabric.model import DEFAULT_FORMAT, ModelFormat
from duplane.fabric.resampler import Resampler, resampler
from duplane.fabric.v1 import lease_pb2, session_pb2

NO_WORKER = "no worker serves"  # why a wait is unknown


class Phase(Enum):
    """The phase of a session; it decides which client events are legal."""

    __hash__ = object.__hash__  # each unit is looked up in several sets; that of Enum is slow

    START = auto()  # only settings and closing are legal
    OPENING = auto()  # settings are accepted; the conversation is not ready yet
    ACTIVE = auto()  # the session takes units or turns
    PAUSED = auto()  # the client has paused its units
    CLOSED = auto()  # the session has ended


class Lifecycle(Enum):
    """Events of the worker and the session that change the phase."""

    OPENED = auto()  # the worker's conversation is ready
    CLOSED = auto()  # the session has ended


Decoders = Mapping[str, Callable[[Fields], Action]]
Transitions = Mapping[tuple[Phase, str], Phase]
Replies = Mapping[str, tuple[str, ...]]
ServerEvents = Mapping[str, frozenset[Phase]]

WAITING = frozenset({Phase.START, Phase.OPENING})  # the client may still wait for a slot
OPEN = frozenset({Phase.ACTIVE, Phase.PAUSED})  # the conversation is ready
ALIVE = WAITING | OPEN

# Phase and cause -> next phase, for all dialects. Any other pair changes nothing.
LIFECYCLE: Mapping[tuple[Phase, Lifecycle], Phase] = {
    (Phase.OPENING, Lifecycle.OPENED): Phase.ACTIVE,
    **{(phase, Lifecycle.CLOSED): Phase.CLOSED for phase in Phase},
}


class Dialect(ABC):
    """The protocol state of one client, in one dialect. A refused event changes nothing."""

    name: ClassVar[str]
    # Phase and event type -> next phase. Every other pair is refused. An event that is legal in
    # OPENING must be legal in ACTIVE: the conversation may open while a thread decodes the event.
    transitions: ClassVar[Transitions]
    # Event type -> the types of events that answer it, now or later; `error` may replace them.
    replies: ClassVar[Replies]
    # Type of a server event -> the phases in which it is sent.
    server_events: ClassVar[ServerEvents]
    queue_prefix: ClassVar[str] = "session."
    # For these close reasons the client gets an `error` event.
    refusals: ClassVar[Mapping[CloseReason, ErrorCode]] = REFUSALS

    # The type of the first event of a client that returns to its session; empty if none can.
    return_event: ClassVar[str] = ""

    # The sound that the client sends, and the sound that it gets: those of A to D. Each rate is
    # converted if the model has another one.
    input_sound: SoundFormat = INPUT_SOUND
    output_sound: SoundFormat = OUTPUT_SOUND

    # The type that the table uses for the only client event, if events have no type of their own.
    only_event: ClassVar[str] = ""

    _ignored: tuple[str, ...] = ()  # paths of settings without effect
    _model_fields: Mapping[str, object] = MappingProxyType({})  # the model's name, if known
    # The duration of the model's units, for clients that count units. Without it, it is one second.
    _unit_fields: Mapping[str, object] = MappingProxyType({})
    _resampler: Resampler | None = None  # of the model's speech; None if the rates are equal

    def __init__(self, identity: Identity, limits: Limits, mode: Mode) -> None:
        self.identity = identity
        self.limits = limits
        self.mode = mode
        self.phase = Phase.START
        self._decoders = self._event_decoders()

    # --- client events ---

    @abstractmethod
    def _event_decoders(self) -> Decoders:
        """Return, for each type of client event, the function that decodes it."""

    def decode(self, event: Fields, phase: Phase | None = None) -> Action:
        """Decode an event that is legal in `phase`, by default the current one. Raises ClientError.

        Decoding changes nothing in the dialect, so a thread can decode a long event.
        """
        try:
            kind = self.only_event or event.get("type", str, required=True)
            if (phase or self.phase, kind) not in self.transitions:
                raise self._refusal(kind, phase or self.phase)
            return self._decoders[kind](event)
        except ClientError as fault:
            fault.input_id = self._input_id(event)
            raise

    def accept(self, action: Action) -> None:
        """Apply the result of `decode` to the dialect. Call this before the next event is decoded.

        This call is not needed for an append, because an append does not change the phase.
        """
        self.phase = self.transitions[self.phase, action.kind]
        if isinstance(action, Configure):
            self._configure(action)

    def _configure(self, settings: Configure) -> None:
        """Keep the settings that later events need."""
        self._ignored = settings.ignored

    def _input_id(self, event: Fields) -> str | None:
        """Return the client's own id of an event, None if the dialect has no such ids."""
        del event
        return None

    def _refusal(self, kind: str, phase: Phase) -> ClientError:
        """Return the error for an event that is not legal in `phase`."""
        if all(kind != known for _, known in self.transitions):
            return ClientError(ErrorCode.UNKNOWN_EVENT, "type: unknown event type")
        if phase is Phase.START:
            message = f"type: {kind} before the session is configured"
            return ClientError(ErrorCode.NOT_READY, message)
        return ClientError(ErrorCode.UNKNOWN_EVENT, f"type: {kind} is allowed only once")

    # --- the session ---

    @property
    def queue_s(self) -> float:
        """How long a client of this dialect waits in the queue, at most."""
        return self.limits.queue_s

    def connected(self, now: Moment) -> list[bytes]:
        """Render what the client is told before it sends anything; mostly nothing."""
        del now
        return []

    def started(self, session_s: float, now: Moment) -> None:
        """Note that the session has its slot, and ends after `session_s`."""
        del session_s, now

    # --- server events ---

    def use_model(self, model: ModelFormat, name: str = "") -> None:
        """Prepare to render the speech of a model. Call this before the first event about it.

        The client is told the `name` of the model, unless this is empty.
        """
        self._model_fields = {"model": name} if name else {}
        is_usual = model.unit_ns == DEFAULT_FORMAT.unit_ns
        self._unit_fields = {} if is_usual else {"unit_s": model.unit_s}
        self._resampler = resampler(model.output_rate_hertz, self.output_sound.rate_hertz)

    def queued(self, queued: lease_pb2.Queued, *, is_update: bool) -> list[bytes]:
        """Render `queued`, or `queue_update` if `is_update`.

        An unknown wait is rendered as 0, with the reason: clients expect a number.
        """
        event: dict[str, object] = {
            "type": f"{self.queue_prefix}{'queue_update' if is_update else 'queued'}",
            "position": queued.position,
            "estimated_wait_s": to_seconds(queued.estimated_wait),
            "ticket_id": queued.ticket_id,
            "queue_length": queued.queue_length,
        }
        if not queued.HasField("estimated_wait"):
            event["reason"] = NO_WORKER
        if not is_update:
            event |= self.identity.recording_field
        return [orjson.dumps(event)]

    def queue_done(self) -> list[bytes]:
        """Render `queue_done`: the session has its slot."""
        kind = f"{self.queue_prefix}queue_done"
        return [orjson.dumps({"type": kind, **self.identity.recording_field})]

    def opened(self, opened: session_pb2.Opened, now: Moment) -> list[bytes]:
        """Render the event that the conversation is ready, if the client waits for this event."""
        return self._opened_events(opened, now) if self._advance(Lifecycle.OPENED) else []

    def ended(self, close: Close, now: Moment) -> list[bytes]:
        """Render the end of the session; nothing if the dialect has no event for the reason."""
        code = self.refusals.get(close.reason)
        events = (
            self._closed_events(close, now)
            if code is None
            else [self.error(code, close.message, now)]
        )
        self._advance(Lifecycle.CLOSED)
        return events

    def close_code(self, close: Close) -> int:
        """Return the WebSocket close code."""
        return CLOSE_CODES[close.reason]

    def _advance(self, cause: Lifecycle) -> bool:
        """Change the phase. Return False if `cause` is not possible in the current phase."""
        after = LIFECYCLE.get((self.phase, cause))
        if after is not None:
            self.phase = after
        return after is not None

    def _opened_events(self, opened: session_pb2.Opened, now: Moment) -> list[bytes]:
        """Render the event that the conversation is ready; nothing if there is no such event."""
        del opened, now
        return []

    def _closed_events(self, close: Close, now: Moment) -> list[bytes]:
        """Render the end of a session that was not refused; nothing if the dialect has no event."""
        del close, now
        return []

    @abstractmethod
    def error(
        self, code: ErrorCode, message: str, now: Moment, input_id: str | None = None
    ) -> bytes:
        """Render an `error` event. `input_id` is the client's id of the input that caused it."""


def queue_events(prefix: str, phases: frozenset[Phase]) -> ServerEvents:
    """Return the table rows of the queue events, which are sent in `phases`."""
    return {f"{prefix}{kind}": phases for kind in ("queued", "queue_update", "queue_done")}


def with_audio(event: Mapping[str, object], pcm: bytes, key: str = "audio") -> bytes:
    """Render `event` with one more field, the audio as base64. The audio is copied only once."""
    head = orjson.dumps(event)[:-1]
    return b"".join((head, b',"', key.encode(), b'":"', pybase64.b64encode(pcm), b'"}'))


def with_optional_audio(event: Mapping[str, object], pcm: bytes) -> bytes:
    """Render `event` with `audio_data`, which is null where there is no audio (C and D)."""
    if pcm:
        return with_audio(event, pcm, "audio_data")
    return orjson.dumps({**event, "audio_data": None})
