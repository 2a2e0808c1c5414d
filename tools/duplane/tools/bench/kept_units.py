"""Past units as an edge keeps them, and as a worker gives them back to its model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from duplane.fabric.audio import pcm_from_samples
from duplane.fabric.past_units import past_unit
from duplane.fabric.unit_audio import pcm_of
from duplane.fabric.v1 import session_pb2
from duplane.worker.models.types import PastUnit, Unit, UnitOutput
from duplane.worker.session.unit_reporter import reach_of


def kept_unit(unit: Unit, output: UnitOutput) -> session_pb2.PastUnit:
    """Return a unit and its output as the edge keeps them."""
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
        reach=reach_of(output),
    )
    return past_unit(sent, delta)


def given_back(slot: int, past: session_pb2.PastUnit, unit: Unit) -> PastUnit:
    """Return a unit that was kept as the worker gives it to the model of another slot."""
    again = replace(
        unit,
        slot=slot,
        force_listen=False,
        audio=np.frombuffer(pcm_of(past), "<f4"),
        frames=tuple(past.video_frames),
    )
    return PastUnit(
        again,
        tuple(past.token_ids),
        past.rebuild_state,
        past.context_token_count,
        unfed_rows=past.row_count,
        had_audio=past.had_sound,
    )
