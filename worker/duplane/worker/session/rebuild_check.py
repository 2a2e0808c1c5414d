"""Checks the past units of a `Rebuild` and translates them for the model. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from duplane.fabric.bounds import MAX_REBUILD_UNIT_COUNT, MAX_STATE_BYTES
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.v1 import session_pb2
from duplane.worker.engine.events import FailedUnit
from duplane.worker.models.interface import ModelConstants
from duplane.worker.models.types import PastUnit, StateChange
from duplane.worker.session.fields import invalid
from duplane.worker.session.unit_check import check_unit
from duplane.worker.settings import SessionLimits

MAX_MESSAGE_BYTES = 8 * 1024 * 1024


def check_model(request: session_pb2.Rebuild, digest: str) -> None:
    """Raise FabricError REBUILD_REFUSED if the units ran on another model."""
    if not digest:
        raise FabricError(Reason.REBUILD_REFUSED, "this worker cannot rebuild conversations")
    if request.model_digest != digest:
        message = f"the units ran on the model {request.model_digest!r}, this one is {digest!r}"
        raise FabricError(Reason.REBUILD_REFUSED, message, field="rebuild.model_digest")


def check_units(
    request: session_pb2.Rebuild,
    limits: SessionLimits,
    model: ModelConstants,
    *,
    slot: int,
    last_sequence: int,
    is_omni: bool,
) -> list[PastUnit]:
    """Return the past units. Raises FabricError INVALID_FIELD with the path of the field."""
    if (count := len(request.units)) > MAX_REBUILD_UNIT_COUNT:
        raise invalid("rebuild.units", f"are {count}, more than {MAX_REBUILD_UNIT_COUNT}")
    if count > 1 and (size := request.ByteSize()) > MAX_MESSAGE_BYTES:
        raise invalid("rebuild.units", f"are {size} bytes, more than {MAX_MESSAGE_BYTES}")
    past_units: list[PastUnit] = []
    for index, past in enumerate(request.units):
        path = f"rebuild.units[{index}]"
        if past.row_count != 0:
            _check_unfed(past, model, path)
        entry = check_unit(
            _unit_of(past),
            limits,
            model,
            slot=slot,
            last_sequence=last_sequence,
            is_omni=is_omni,
            is_paused=False,
            may_be_silent=past.row_count > 0,
        )
        if isinstance(entry, FailedUnit):
            field = f"{path}.{entry.field}"
            raise FabricError(Reason.INVALID_FIELD, f"{path}: {entry.message}", field=field)
        if not (past.rebuild_state or past.HasField("state_change")):
            raise invalid(f"{path}.rebuild_state", "is missing")
        if (size := len(past.rebuild_state)) > MAX_STATE_BYTES:
            raise invalid(f"{path}.rebuild_state", f"is {size} bytes, more than {MAX_STATE_BYTES}")
        past_units.append(
            PastUnit(
                entry.unit,
                tuple(past.token_ids),
                past.rebuild_state,
                past.context_token_count,
                None if past.rebuild_state else _change(past.state_change),
                past.row_count,
                past.had_sound,
            )
        )
        last_sequence = past.sequence
    return past_units


def parts_of(units: Sequence[PastUnit], picture_unit_count: int) -> Iterator[Sequence[PastUnit]]:
    """Yield the units in parts, each with at most `picture_unit_count` units with pictures.

    Without units there is one empty part.
    """
    begin = count = 0
    for index, past in enumerate(units):
        if not past.unit.frames:
            continue
        if count == picture_unit_count:
            yield units[begin:index]
            begin, count = index, 0
        count += 1
    yield units[begin:]


def _check_unfed(past: session_pb2.PastUnit, model: ModelConstants, path: str) -> None:
    """Refuse `row_count` for a model that needs all units whole, and pictures beside it."""
    if past.row_count < 0:
        raise invalid(f"{path}.row_count", f"is {past.row_count}, less than 0")
    if not model.accepts_unfed_units:
        raise invalid(f"{path}.row_count", "is set, but this model needs all units whole")
    if past.video_frames:
        raise invalid(f"{path}.row_count", "and video_frames are both set")


def _change(change: session_pb2.StateChange) -> StateChange:
    """Return the state of a unit that a worker of release 0.1 ran."""
    return StateChange(
        tuple(change.speech_token_ids),
        tuple(change.chosen_token_ids),
        change.draw_count,
        change.interrupted_turn,
    )


def _unit_of(past: session_pb2.PastUnit) -> session_pb2.Unit:
    """Return a past unit as it was sent."""
    unit = session_pb2.Unit(
        sequence=past.sequence,
        audio=past.audio,
        audio_int16=past.audio_int16,
        audio_exponent=past.audio_exponent,
        video_frames=past.video_frames,
    )
    if past.HasField("max_slice_count"):
        unit.max_slice_count = past.max_slice_count
    return unit
