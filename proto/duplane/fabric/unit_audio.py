"""The sound of a unit in the two forms of the contract: float32, and int16 with an exponent."""

from __future__ import annotations

from duplane.fabric.audio import packed_from_pcm, pcm_from_int16
from duplane.fabric.v1 import session_pb2


def pcm_of(unit: session_pb2.Unit | session_pb2.PastUnit) -> bytes:
    """Return the unit's sound as float32 bytes."""
    return unit.audio or pcm_from_int16(unit.audio_int16, unit.audio_exponent)


def fit_audio(unit: session_pb2.Unit, *, is_int16: bool) -> None:
    """Give the unit's sound the form that a worker reads: int16, or as of older releases.

    A past unit has int16. So a model that gets int16 hears the same as one that is rebuilt.
    """
    if is_int16:
        pack_audio(unit)
    else:
        unpack_audio(unit)


def pack_audio(unit: session_pb2.Unit | session_pb2.PastUnit) -> None:
    """Round the unit's sound to int16. A sound that no worker accepts stays as it is."""
    if unit.audio and (packed := packed_from_pcm(unit.audio)):
        unit.audio_int16, unit.audio_exponent = packed
        unit.ClearField("audio")


def unpack_audio(unit: session_pb2.Unit | session_pb2.PastUnit) -> None:
    """Give the unit's sound the form that workers of older releases read."""
    if unit.audio_int16:
        unit.audio = pcm_of(unit)
        unit.ClearField("audio_int16")
        unit.ClearField("audio_exponent")
