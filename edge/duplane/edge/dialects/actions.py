"""Actions: decoded client events, in the same form for every dialect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from duplane.edge.payload.rates import INPUT_RATE_HERTZ
from duplane.fabric.v1 import session_pb2


@dataclass(frozen=True, slots=True)
class Tag:
    """Ids that a client of B sends with its audio and gets back with the reply."""

    input_id: str | None = None
    response_id: str | None = None


NO_TAG = Tag()


class Dropped(NamedTuple):
    """How many units and pictures were dropped since the last reply, without reaching the model."""

    unit_count: int = 0
    frame_count: int = 0  # pictures above a unit's bound; not the pictures of dropped units


NOTHING_DROPPED = Dropped()


@dataclass(frozen=True, slots=True)
class Resumption:
    """Whether a client may return to its session on another socket.

    If it waited at another edge, its `queue_token` has its place there; otherwise it is empty.
    """

    is_resumable: bool = False
    queue_token: str = field(default="", repr=False)


NOT_RESUMABLE = Resumption()


@dataclass(frozen=True, slots=True)
class Configure:
    """The settings of a duplex session, with which the conversation can be opened.

    `ignored` holds the paths of fields without effect. `paths` maps fields of `settings` to their
    paths in the client's event. `max_slice_count` applies to the pictures of each append that has
    no `max_slice_count` of its own. `input_id` is the client's id of the event.
    """

    settings: session_pb2.Open
    max_slice_count: int | None = None
    ignored: tuple[str, ...] = ()
    paths: Mapping[str, str] = field(default_factory=dict[str, str])
    kind: str = ""
    input_id: str | None = None
    resumption: Resumption = NOT_RESUMABLE


@dataclass(frozen=True, slots=True)
class Append:
    """Audio of any length (float32 PCM at `rate_hertz`, checked), pictures, or both.

    `max_slice_count` limits the slices of each picture. It has the client's value, or else the
    session's default. If it is None, a picture has one slice. `rest` has the bytes of a sample that
    is not complete; the next append has its other bytes.
    """

    audio: bytes
    force_listen: bool = False
    tag: Tag = NO_TAG
    frames: tuple[bytes, ...] = ()
    max_slice_count: int | None = None
    kind: str = ""
    rate_hertz: int = INPUT_RATE_HERTZ  # dialects A to D have no other rate
    rest: bytes = b""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of chat. The runner adds the lease when it runs the turn.

    `ignored` holds the paths of fields without effect. `paths` maps fields of `request.config` to
    their paths in the client's event. `model` is the model that the turn asks for by name; if it is
    empty, the session's URL decides.
    """

    request: session_pb2.ChatRequest
    is_streaming: bool = True
    input_id: str | None = None
    ignored: tuple[str, ...] = ()
    paths: Mapping[str, str] = field(default_factory=dict[str, str])
    kind: str = ""
    model: str = ""


@dataclass(frozen=True, slots=True)
class Reply:
    """Events for the client now, and a request that the worker gets after all earlier units.

    If `is_interrupt` is true, the model must listen to the next append.
    """

    events: tuple[bytes, ...] = ()
    request: session_pb2.ConverseRequest | None = None
    kind: str = ""
    is_interrupt: bool = False


@dataclass(frozen=True, slots=True)
class Command:
    """An event that the dialect answers itself, from its state after it has accepted the event.

    `input_id` is the client's id of the event. `drops_audio` drops the audio of the unit that is
    not complete.
    """

    kind: str
    input_id: str | None = None
    drops_audio: bool = False


@dataclass(frozen=True, slots=True)
class CancelTurn:
    """The client ends the turn of chat that waits or runs; there must be one.

    `input_id` is the client's id of the event.
    """

    kind: str
    input_id: str | None = None


@dataclass(frozen=True, slots=True)
class Speak:
    """A text that the model must speak, as a turn of its own that begins with the next unit.

    If the model is in a turn, the text begins after this turn. An append that forces the model to
    listen ends the text and all that wait. `input_id` is the client's id of the request.
    """

    text: str
    kind: str = ""
    input_id: str | None = None


class SpeechEnding(Enum):
    """How a requested text has ended."""

    SPOKEN = "spoken"
    INTERRUPTED = "interrupted"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Leave:
    """The client ends its session. `input_id` is the client's id of the event."""

    reason: str = ""
    kind: str = ""
    input_id: str | None = None


@dataclass(frozen=True, slots=True)
class Return:
    """A client returns to the session `session_id`, which another socket had before.

    The id is empty if the token has another form than those of edges.

    The last event that it has is event `part` of `unit`; both are -1 if it has none. `from_sample`
    is the first sample of its input that it can still send; None if it has all that is missing.
    """

    session_id: str
    secret: str = field(repr=False)
    unit: int = -1
    part: int = -1
    from_sample: int | None = None


Action = Configure | Append | Turn | CancelTurn | Reply | Command | Speak | Leave
