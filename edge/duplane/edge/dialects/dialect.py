"""What every dialect is: client events in, wishes out; fabric messages in, JSON events out.

Decides which client event is legal when. Knows no sockets, no clocks, no tasks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import ClassVar, NamedTuple

import orjson
import pybase64

from duplane.edge.dialects.fields import Fields
from duplane.edge.ends import CLOSE_CODES, REFUSALS, End, Ending
from duplane.edge.faults import ClientError, ErrorCode, name_fault
from duplane.edge.modes import Mode
from duplane.edge.settings import Limits
from duplane.fabric.v1 import lease_pb2, session_pb2


class Moment(NamedTuple):
    """Now, twice: for durations, and for what people read. Passed in by whoever owns a clock."""

    monotonic_s: float
    wall_ns: int

    @property
    def wall_s(self) -> float:
        """Unix time in seconds."""
        return self.wall_ns / 1e9


class Phase(Enum):
    """Where a session is, as far as its client's events are concerned."""

    START = auto()  # nothing legal but settings and leaving
    OPENING = auto()  # settings are accepted; the conversation is not ready yet
    ACTIVE = auto()  # units flow
    PAUSED = auto()  # they do not, by the client's wish
    CLOSED = auto()  # nothing is answered any more


class Happening(Enum):
    """What changes the phase of a session and is not its client's doing."""

    OPENED = auto()  # the worker's conversation is ready
    ENDED = auto()  # for whatever reason


@dataclass(frozen=True, slots=True)
class Identity:
    """What a session is called: inside (and in B), and in A, where the form is documented."""

    session_id: str  # sess_ and 12 hex digits
    realtime_id: str  # rt_ and a Unix time in milliseconds
    recording_id: str = ""  # told to the client when the session is recorded


@dataclass(frozen=True, slots=True)
class Tag:
    """What a client wants to see again on the answers to its audio. Absent in A."""

    input_id: str | None = None
    response_id: str | None = None


NO_TAG = Tag()


@dataclass(frozen=True, slots=True)
class Configure:
    """The client's settings are complete: open the conversation."""

    settings: session_pb2.Open


@dataclass(frozen=True, slots=True)
class Append:
    """Audio of any length, float32 PCM at 16 kHz, and pictures; checked.

    Without audio it is of pictures alone. `max_slice_count` None means one slice per picture.
    """

    audio: bytes
    force_listen: bool = False
    tag: Tag = NO_TAG
    frames: tuple[bytes, ...] = ()
    max_slice_count: int | None = None


@dataclass(frozen=True, slots=True)
class Leave:
    """The client ends its session."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """Tell the client these events at once, and the worker this, after the units before it."""

    events: tuple[bytes, ...] = ()
    request: session_pb2.ConverseRequest | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of chat is asked for; its lease is not known yet."""

    request: session_pb2.ChatRequest
    is_streaming: bool = True
    input_id: str | None = None
    ignored_fields: tuple[str, ...] = ()  # paths of what was sent and has no effect


Action = Configure | Append | Leave | Answer | Turn
Transitions = Mapping[tuple[Phase, str], Phase]
Answers = Mapping[str, tuple[str, ...]]
ServerEvents = Mapping[str, frozenset[Phase]]

WAITING = frozenset({Phase.START, Phase.OPENING})  # a client may wait for a slot in these
OPEN = frozenset({Phase.ACTIVE, Phase.PAUSED})  # the conversation is ready in these
ALIVE = WAITING | OPEN

# The same in every dialect; what is not here changes nothing.
HAPPENINGS: Mapping[tuple[Phase, Happening], Phase] = {
    (Phase.OPENING, Happening.OPENED): Phase.ACTIVE,
    **{(phase, Happening.ENDED): Phase.CLOSED for phase in Phase},
}


class Dialect(ABC):
    """One client's conversation in one dialect. A fault leaves the phase as it was."""

    name: ClassVar[str]
    # Which event a client may send in which phase, and the phase after it. Any other is refused.
    transitions: ClassVar[Transitions]
    # What each of them is answered by, at once or later; `error` may take the place of any.
    answers: ClassVar[Answers]
    # What is told, and in which phases.
    server_events: ClassVar[ServerEvents]
    queue_prefix: ClassVar[str] = "session."
    # Whether every append has exactly one answer, rather than every unit.
    answers_appends: ClassVar[bool] = False
    # What it looks like when the worker is lost before the conversation is ready.
    lost_while_opening: ClassVar[End]

    def __init__(self, identity: Identity, limits: Limits, mode: Mode) -> None:
        self.identity = identity
        self.limits = limits
        self.mode = mode
        self.phase = Phase.START

    def receive(self, event: Fields) -> Action:
        """Take one client event. Raises ClientError."""
        kind = self._kind(event)
        after = self.transitions.get((self.phase, kind))
        if after is None:
            raise self._refusal(kind)
        action = self._read(kind, event)
        self.phase = after
        return action

    def _kind(self, event: Fields) -> str:
        """Return what the tables know an event by. Raises ClientError."""
        return event.required_text("type")

    def _happen(self, happening: Happening) -> bool:
        """Change the phase; tell whether this can happen now."""
        after = HAPPENINGS.get((self.phase, happening))
        if after is None:
            return False
        self.phase = after
        return True

    def _refusal(self, kind: str) -> ClientError:
        """Return the fault of an event that is not legal now."""
        if all(kind != known for _, known in self.transitions):
            return ClientError(ErrorCode.UNKNOWN_EVENT, "type: unknown event type")
        if self.phase is Phase.START:
            message = f"type: {kind} before the session is configured"
            return ClientError(ErrorCode.NOT_READY, message)
        return ClientError(ErrorCode.UNKNOWN_EVENT, f"type: {kind} is allowed only once")

    def opened(self, opened: session_pb2.Opened, now: Moment) -> list[bytes]:
        """Tell the client that the conversation is ready, if it waits for that."""
        return self._opened_events(opened, now) if self._happen(Happening.OPENED) else []

    def ended(self, ending: Ending, now: Moment) -> list[bytes]:
        """Tell the client why it is over, if it can be told."""
        code = REFUSALS.get(ending.end)
        told = (
            self._closed_events(ending, now)
            if code is None
            else [self.error(code, ending.message, now)]
        )
        self._happen(Happening.ENDED)
        return told

    def close_code(self, ending: Ending) -> int:
        """Return the code that the connection is closed with."""
        return CLOSE_CODES[ending.end]

    @abstractmethod
    def _read(self, kind: str, event: Fields) -> Action:
        """Turn an event that is legal now into an action. Raises ClientError."""

    @abstractmethod
    def _opened_events(self, opened: session_pb2.Opened, now: Moment) -> list[bytes]: ...

    @abstractmethod
    def delta(
        self, delta: session_pb2.Delta, tag: Tag, dropped_count: int, now: Moment
    ) -> list[bytes]:
        """Render the output of one unit; `dropped_count` units were lost since the one before."""

    def gathered(self, tag: Tag, now: Moment) -> list[bytes]:
        """Tell of an append that was taken and completed no unit, where clients wait for that."""
        del tag, now
        return []

    @abstractmethod
    def _closed_events(self, ending: Ending, now: Moment) -> list[bytes]: ...

    @abstractmethod
    def error(
        self, code: ErrorCode, message: str, now: Moment, input_id: str | None = None
    ) -> bytes:
        """Render an `error` event, about an input that may have a name."""

    def failed(self, failed: session_pb2.Failed, now: Moment, input_id: str | None = None) -> bytes:
        """Render a unit that could not be used."""
        code = FAILURES.get(failed.reason, ErrorCode.INFERENCE_ERROR)
        message = name_fault(failed.field, failed.message or "the unit could not be used")
        return self.error(code, message, now, input_id)


def queue_events(prefix: str, phases: frozenset[Phase]) -> ServerEvents:
    """Return what a client that waits for a slot is told, in `phases`."""
    return {f"{prefix}{kind}": phases for kind in ("queued", "queue_update", "queue_done")}


# Units that failed through the client's doing; every other reason is ours.
FAILURES: Mapping[str, ErrorCode] = {
    "INVALID_FIELD": ErrorCode.INVALID_PAYLOAD,
    "UNIT_TOO_LONG": ErrorCode.INVALID_PAYLOAD,
    "PAUSED": ErrorCode.NOT_READY,
}


def queue_event(kind: str, queued: lease_pb2.Queued) -> bytes:
    """Render `queued` or `queue_update`, the same in every dialect but for its prefix.

    A wait that nobody can estimate yet is told as 0: clients do arithmetic on it.
    """
    return orjson.dumps(
        {
            "type": kind,
            "position": queued.position,
            "estimated_wait_s": queued.estimated_wait.ToMicroseconds() / 1e6,
            "ticket_id": queued.ticket_id,
            "queue_length": queued.queue_length,
        }
    )


def with_audio(event: Mapping[str, object], pcm: bytes, key: str = "audio") -> bytes:
    """Render `event` with one more field, the audio, which is encoded and copied once each."""
    head = orjson.dumps(event)[:-1]
    return b"".join((head, b',"', key.encode(), b'":"', pybase64.b64encode(pcm), b'"}'))
