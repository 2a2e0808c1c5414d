"""Synthesises the default reference voice, so that the package needs no sound file.

The voice consists of a few vowels. A vowel is a sum of harmonics of a falling pitch; three formants
determine the loudness of each harmonic.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from duplane.edge.payload.rates import VOICE_RATE_HERTZ
from duplane.fabric.audio import Samples

NAME = "duplane.wav"

_VOWEL_S = 0.5
_FADE_S = 0.06
_PITCH_HERTZ = (190.0, 140.0)  # at the beginning and the end of each vowel
_HARMONIC_COUNT = 28
_PEAK = 0.4
# Bandwidths of the three formants in Hz, and their frequencies for a, e, i, o, u and a again.
_BANDWIDTHS = (90.0, 110.0, 170.0)
_VOWELS = (
    (800.0, 1200.0, 2500.0),
    (480.0, 2000.0, 2600.0),
    (300.0, 2300.0, 3000.0),
    (500.0, 900.0, 2400.0),
    (320.0, 800.0, 2250.0),
    (800.0, 1200.0, 2500.0),
)


def default_voice() -> Samples:
    """Return the voice: float32 at 16 kHz, about three seconds, always the same."""
    voice = np.concatenate([_vowel(formants) for formants in _VOWELS])
    return (voice * (_PEAK / np.abs(voice).max())).astype(np.float32)


def _vowel(formants: tuple[float, ...]) -> NDArray[np.float64]:
    count = round(_VOWEL_S * VOICE_RATE_HERTZ)
    pitch = np.linspace(*_PITCH_HERTZ, count)
    phase = 2 * np.pi * np.cumsum(pitch) / VOICE_RATE_HERTZ
    harmonics = np.arange(1, _HARMONIC_COUNT + 1)[:, np.newaxis]
    gain = sum(
        1 / (1 + ((harmonics * pitch - formant) / bandwidth) ** 2)
        for formant, bandwidth in zip(formants, _BANDWIDTHS, strict=True)
    )
    sound = (gain / harmonics * np.sin(harmonics * phase)).sum(axis=0)
    edge = round(_FADE_S * VOICE_RATE_HERTZ)
    fade = np.minimum(1.0, np.minimum(np.arange(count), np.arange(count)[::-1]) / edge)
    return sound * fade
