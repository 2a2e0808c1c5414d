"""The samples of one spoken unit, as the duplex path hands them out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from duplane.worker.model.types import FloatArray

UNIT_SAMPLES = 24_000


def int16_round_trip(samples: FloatArray) -> FloatArray:
    """Quantise float samples as the reference does on their way out: float32 in, float32 out.

    Clipped to [-1, 1], times 32767, truncated towards zero, over 32768.
    """
    scaled = np.clip(samples, -1.0, 1.0) * np.float32(32767.0)
    return scaled.astype(np.int16).astype(np.float32) / np.float32(32768.0)


def unit_speech(pieces: Sequence[FloatArray], *, end_of_turn: bool) -> FloatArray:
    """Join what the vocoder made of one unit's tokens, `[samples]` at 24 kHz.

    Inside a turn a unit is at least a second long: zeros are put in front of shorter speech, so
    that what follows joins on. Nothing at all stays nothing.
    """
    if not any(len(piece) for piece in pieces):
        return np.zeros(0, np.float32)
    samples = int16_round_trip(np.concatenate(pieces))
    missing = 0 if end_of_turn else max(0, UNIT_SAMPLES - len(samples))
    return np.pad(samples, (missing, 0))
