"""The two forms of a unit's sound."""

from __future__ import annotations

import numpy as np
import pytest

from duplane.fabric.past_units import past_unit
from duplane.fabric.unit_audio import pack_audio, unpack_audio
from duplane.fabric.v1 import session_pb2


def unit_of(samples: list[float]) -> session_pb2.Unit:
    return session_pb2.Unit(sequence=3, audio=np.array(samples, "<f4").tobytes())


@pytest.mark.parametrize("scale", [1.0, 1.5, 1000.0])
def test_sound_is_rounded_once_and_then_stays_the_same(scale: float) -> None:
    unit = unit_of([0.1 * scale, -0.7 * scale, scale])
    sent = np.frombuffer(unit.audio, "<f4").copy()
    pack_audio(unit)
    assert (unit.audio, len(unit.audio_int16)) == (b"", 6)
    packed = session_pb2.Unit()
    packed.CopyFrom(unit)
    past = past_unit(unit, session_pb2.Delta())
    assert past.audio_int16 == packed.audio_int16
    assert past.audio_exponent == packed.audio_exponent
    unpack_audio(unit)
    heard = np.frombuffer(unit.audio, "<f4")
    assert np.abs(heard - sent).max() <= 2.0**packed.audio_exponent / 32_768
    pack_audio(unit)
    assert unit == packed


def test_sound_of_int16_files_is_not_changed() -> None:
    samples = np.arange(-32_768, 32_768, 7) / 32_768
    unit = unit_of(list(samples))
    before = unit.audio
    pack_audio(unit)
    unpack_audio(unit)
    assert unit.audio == before


@pytest.mark.parametrize("samples", [[], [float("nan")], [float("inf")], [1e7]])
def test_sound_that_is_refused_stays_for_the_worker_to_name_it(samples: list[float]) -> None:
    unit, before = unit_of(samples), unit_of(samples)
    pack_audio(unit)
    assert unit.SerializeToString() == before.SerializeToString()
    unpack_audio(unit)
    assert unit.SerializeToString() == before.SerializeToString()
