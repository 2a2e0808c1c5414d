"""Keeps the units of a conversation as an edge does, and gives them back to a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from support.model.past_units import RanUnit

from duplane.fabric.audio import pcm_from_int16, pcm_from_samples
from duplane.fabric.past_units import PastUnits, past_unit
from duplane.fabric.v1 import session_pb2
from duplane.worker.models.types import PastUnit


def kept(outputs: Sequence[RanUnit], begin: int | None = None, windows: int = 2) -> PastUnits:
    """Return the past units of a conversation after its last unit.

    A rebuild feeds them from `begin` on, by default from the unit that keeps so many `windows`.
    """
    units = PastUnits()
    for output in outputs:
        units.append(_past(output))
        if begin is None:
            units.drop_before(next(units.begins(windows)))
    if begin is not None:
        units.drop_before(begin)
    return units


def given_back(slot: int, units: PastUnits, outputs: Sequence[RanUnit]) -> list[PastUnit]:
    """Return the past units as the worker gives them to the model."""
    return [
        _given_back(slot, past, output) for past, output in zip(units.units, outputs, strict=True)
    ]


def _past(output: RanUnit) -> session_pb2.PastUnit:
    unit = output.unit
    sent = session_pb2.Unit(
        sequence=unit.sequence,
        audio=pcm_from_samples(unit.audio),
        video_frames=[frame for frame in unit.frames if isinstance(frame, bytes)],
    )
    delta = session_pb2.Delta(
        sequence=unit.sequence,
        token_ids=output.token_ids,
        rebuild_state=output.state,
        context_token_count=output.context_length,
    )
    if reach := output.reach:
        delta.reach.CopyFrom(
            session_pb2.UnitReach(
                row_count=reach.row_count,
                context_unit_count=reach.context_units,
                sound_unit_count=reach.sound_units,
                turn_unit_count=reach.turn_units,
            )
        )
    return past_unit(sent, delta)


def _given_back(slot: int, past: session_pb2.PastUnit, output: RanUnit) -> PastUnit:
    pcm = pcm_from_int16(past.audio_int16, past.audio_exponent) if past.audio_int16 else past.audio
    unit = replace(
        output.unit,
        slot=slot,
        force_listen=False,
        audio=np.frombuffer(pcm, "<f4"),
        frames=tuple(past.video_frames),
    )
    return PastUnit(
        unit,
        tuple(past.token_ids),
        past.rebuild_state,
        past.context_token_count,
        unfed_rows=past.row_count,
        had_audio=past.had_sound,
    )
