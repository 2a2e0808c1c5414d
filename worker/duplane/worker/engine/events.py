"""Events that the device thread posts to the call that holds a slot."""

from __future__ import annotations

from dataclasses import dataclass

from duplane.fabric.errors import Reason
from duplane.fabric.v1.trace_pb2 import TraceContext
from duplane.worker.engine.unit_record import UnitRecord
from duplane.worker.models.chat import ChatOutput
from duplane.worker.models.types import Opened, Rebuilt, UnitFailure, UnitOutput


@dataclass(frozen=True, slots=True)
class Lost:
    """A call into the model failed, and the conversation cannot continue. The log has the cause."""


@dataclass(frozen=True, slots=True)
class RebuildRefused:
    """The model cannot rebuild the conversation from the given units. The conversation is lost.

    `reason` is REBUILD_REFUSED or REBUILD_DIFFERS. `field` is the path of the invalid field.
    """

    reason: Reason
    message: str
    field: str


@dataclass(frozen=True, slots=True)
class AnsweredUnit:
    """The output of a unit, and the record of the unit."""

    record: UnitRecord
    output: UnitOutput


@dataclass(frozen=True, slots=True)
class FailedUnit:
    """The answer to a unit that has no output.

    A unit that is refused before it runs stays in the inbox as a FailedUnit, at its position, so
    that the answers have the order of the units. If the failure `is_fatal`, the conversation is
    lost. `record` is the unit's record if the model or the preparer was called with the unit.
    """

    sequence: int
    reason: str
    message: str
    field: str = ""
    receive_time_ns: int = 0
    trace: TraceContext | None = None
    is_fatal: bool = False
    record: UnitRecord | None = None


@dataclass(frozen=True, slots=True)
class DroppedUnit:
    """A unit, or the answer to a refused unit, that the full inbox has dropped."""

    entry: UnitRecord | FailedUnit


@dataclass(frozen=True, slots=True)
class ChatStep:
    """An output of a chat, which came from a launch for `batch_size` slots."""

    output: ChatOutput
    batch_size: int


Event = (
    Opened | Lost | AnsweredUnit | FailedUnit | DroppedUnit | ChatStep | Rebuilt | RebuildRefused
)

# Maps the model's reason for a failed unit to the invalid field of the unit. This table is used if
# the failure itself names no field.
_FIELDS_AT_FAULT = {
    "AUDIO_INVALID": "audio",
    "AUDIO_TOO_SHORT": "audio",
    "AUDIO_BACKLOG": "audio",
    "FRAMES_UNSUPPORTED": "video_frames",
    "PICTURES_WAIT": "video_frames",
}
# Maps the model's reason to its name in the contract, where these two names differ.
_REASONS = {"IMAGE_INVALID": Reason.INVALID_FIELD}


def failed_unit(record: UnitRecord, failure: UnitFailure) -> FailedUnit:
    """Return the answer to a unit that the model could not use."""
    field = failure.field.replace("frames[", "video_frames[")
    return FailedUnit(
        record.sequence,
        _REASONS.get(failure.reason, failure.reason),
        f"{field} cannot be used: {failure.message}" if field else failure.message,
        field or _FIELDS_AT_FAULT.get(failure.reason, ""),
        record.receive_time_ns,
        record.trace,
        failure.is_fatal,
        record,
    )
