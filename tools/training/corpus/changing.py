"""Changes voices and their lines: the vocal tract, the room, the band of frequencies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from duplane.worker.models.minicpm_o.types import INPUT_SAMPLE_RATE
from duplane.worker.models.types import FloatArray
from training.corpus.clips import narrowed, resample, telephoned
from training.corpus.rooms import colour, normalise, reverberate

_FRAME, _HOP = 512, 128
_QUEFRENCIES = 24
"""Cepstral coefficients that describe the vocal tract; the pitch is in those above."""
_GRAIN, _STEP, _SEARCH = 640, 320, 160
"""Samples of the parts that are joined to make a sound longer, of the distance between them, and by
which a part may come earlier or later so that it continues the wave."""


@dataclass(frozen=True)
class Changes:
    """The share of utterances that each change affects, and the ranges of its strength.

    `speed` resamples: pitch, formants and tempo change together. `tract` moves only the formants.
    `length` changes only the tempo: a word that is spoken alone is up to twice as long as the same
    word in a sentence.
    """

    speed: tuple[float, float] = (1.0, 1.0)
    tract: tuple[float, float] = (0.86, 1.16)
    length: tuple[float, float] = (1.0, 1.0)
    moved: float = 0.3
    lengthened: float = 0.0
    narrow: float = 0.3
    telephone: float = 0.12
    coloured: float = 0.5
    reverberant: float = 0.35


@dataclass(frozen=True)
class VoiceChange:
    """How the voice of an utterance is changed; `speed` above 1 makes it shorter and higher."""

    speed: float = 1.0
    tract: float = 1.0
    length: float = 1.0

    def apply(self, samples: FloatArray) -> FloatArray:
        """Change a voice; `moved` maps its times."""
        if self.speed != 1.0:
            samples = resample(samples, INPUT_SAMPLE_RATE * self.speed, INPUT_SAMPLE_RATE)
        if self.tract != 1.0:
            samples = with_tract(samples, self.tract)
        return samples if self.length == 1.0 else with_length(samples, self.length)

    def moved(self, time_s: float) -> float:
        """Return where a time of the sound is after the change."""
        return time_s / self.speed * self.length


def draw_voice_change(changes: Changes, chance: np.random.Generator) -> VoiceChange:
    """Draw how the voice of an utterance is changed."""
    speed = float(chance.uniform(*changes.speed))
    tract = float(chance.uniform(*changes.tract)) if chance.random() < changes.moved else 1.0
    return VoiceChange(speed, tract, draw_length(changes, chance))


def draw_length(changes: Changes, chance: np.random.Generator) -> float:
    """Draw the factor of the length of an utterance, or of one of its words."""
    if changes.lengthened and chance.random() < changes.lengthened:
        return float(chance.uniform(*changes.length))
    return 1.0


def send(samples: FloatArray, changes: Changes, chance: np.random.Generator) -> FloatArray:
    """Send an utterance through a random room, microphone and line; it keeps its length."""
    count = len(samples)
    samples = normalise(samples)
    if chance.random() < changes.reverberant:
        samples = reverberate(samples, chance)
    if chance.random() < changes.coloured:
        samples = colour(samples, chance)
    line = chance.random()
    if line < changes.telephone:
        samples = telephoned(normalise(samples))
    elif line < changes.telephone + changes.narrow:
        samples = narrowed(samples)
    samples = np.pad(samples[:count], (0, max(0, count - len(samples))))
    return normalise(samples)


def with_length(samples: FloatArray, factor: float) -> FloatArray:
    """Make a sound longer by a factor of at least 0.7; pitch and formants stay.

    Overlapping parts of the sound are joined. Each is the one near its place that is most like the
    continuation of the part before.
    """
    count = int(len(samples) * factor)
    padded = np.pad(samples, (_GRAIN, 3 * _GRAIN))
    window = np.hanning(_GRAIN + 1)[:-1].astype(np.float32)
    made = np.zeros(count + 2 * _GRAIN, np.float32)
    at = _GRAIN - _STEP
    for start in range(0, count + _STEP, _STEP):
        place = int((start - _STEP) / factor) + _GRAIN - _SEARCH
        wanted = padded[at + _STEP : at + _STEP + _GRAIN]
        near = padded[place : place + 2 * _SEARCH + _GRAIN]
        at = place + int(np.argmax(np.correlate(near, wanted, "valid")))
        made[start : start + _GRAIN] += padded[at : at + _GRAIN] * window
    return made[_STEP : _STEP + count]


def with_tract(samples: FloatArray, factor: float) -> FloatArray:
    """Move the formants up by a factor; pitch and length stay as they are."""
    count = len(samples)
    padded = np.pad(samples, (_FRAME, 2 * _FRAME))
    starts = np.arange(0, len(padded) - _FRAME, _HOP)
    window = np.hanning(_FRAME + 1)[:-1].astype(np.float32)
    frames = padded[starts[:, None] + np.arange(_FRAME)] * window
    spectra = np.fft.rfft(frames, axis=1)
    envelope = _envelope(np.abs(spectra))
    bins = int(envelope.shape[1])
    at: NDArray[np.float64] = np.minimum(np.arange(bins) / factor, bins - 1)
    low = at.astype(np.int64)
    high = np.minimum(low + 1, bins - 1)
    moved = envelope[:, low] + (envelope[:, high] - envelope[:, low]) * (at - low)
    spectra = spectra * np.exp((moved - envelope).clip(-3.0, 3.0))
    made = np.fft.irfft(spectra, _FRAME, axis=1) * window
    sound = np.zeros(len(padded), np.float64)
    for number, start in enumerate(starts):
        sound[start : start + _FRAME] += made[number]
    scale = np.square(window).sum() / _HOP
    return (sound[_FRAME : _FRAME + count] / scale).astype(np.float32)


def _envelope(magnitudes: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return the logarithm of each frame's spectral envelope, from its low quefrencies."""
    logs = np.log(magnitudes + 1e-5)
    cepstra = np.fft.irfft(logs, axis=1)
    cepstra[:, _QUEFRENCIES:-_QUEFRENCIES] = 0.0
    return np.fft.rfft(cepstra, axis=1).real
