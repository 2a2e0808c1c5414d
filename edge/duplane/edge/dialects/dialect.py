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
from duplane.edge.faults import ClientError, ErrorCode
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


Action = Configure | Append | Leave | Answer | Turn
Transitions = Mapping[tuple[Phase, str], Phase]


class Dialect(ABC):
    """One client's conversation in one dialect. A fault leaves the phase as it was."""

    name: ClassVar[str]
    transitions: ClassVar[Transitions]
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
        kind = event.required_text("type")
        after = self._next_phase(kind)
        action = self._read(kind, event)
        self.phase = after
        return action

    def _next_phase(self, kind: str) -> Phase:
        after = self.transitions.get((self.phase, kind))
        if after is not None:
            return after
        raise self._refusal(kind)

    def _refusal(self, kind: str) -> ClientError:
        """Return the fault of an event that is not legal now."""
        if all(kind != known for _, known in self.transitions):
            return ClientError(ErrorCode.UNKNOWN_EVENT, "type: unknown event type")
        if self.phase is Phase.START:
            message = f"type: {kind} before the session is configured"
            return ClientError(ErrorCode.NOT_READY, message)
        return ClientError(ErrorCode.UNKNOWN_EVENT, f"type: {kind} is allowed only once")

    def opened(self, opened: session_pb2.Opened, now: Moment) -> list[bytes]:
        """Tell the client that the conversation is ready."""
        self.phase = Phase.ACTIVE
        return self._opened_events(opened, now)

    def ended(self, ending: Ending, now: Moment) -> list[bytes]:
        """Tell the client why it is over, if it can be told."""
        code = REFUSALS.get(ending.end)
        told = (
            self._closed_events(ending, now)
            if code is None
            else [self.error(code, ending.message, now)]
        )
        self.phase = Phase.CLOSED
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
    def error(self, code: ErrorCode, message: str, now: Moment) -> bytes:
        """Render an `error` event."""

    def failed(self, failed: session_pb2.Failed, now: Moment) -> bytes:
        """Render a unit that could not be used."""
        code = FAILURES.get(failed.reason, ErrorCode.INFERENCE_ERROR)
        message = f"{failed.field}: {failed.message}" if failed.field else failed.message
        return self.error(code, message or "the unit could not be used", now)


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
