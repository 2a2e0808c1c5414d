"""Simulates the path from a mouth to a microphone: filters, echo and noise, all synthetic."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from duplane.worker.models.minicpm_o.types import INPUT_SAMPLE_RATE
from duplane.worker.models.types import FloatArray

BANDS = 10
MOST_DB = 10.0

Array = NDArray[np.float32]


def colour(samples: FloatArray, chance: np.random.Generator, strength: float = 1.0) -> FloatArray:
    """Filter with a smooth random frequency response, like that of a microphone or a telephone."""
    size = _fast_size(len(samples))
    spectrum = np.fft.rfft(samples, size)
    gains = chance.normal(0.0, 3.5 * strength, BANDS).clip(-MOST_DB, MOST_DB)
    if chance.random() < 0.15:  # a channel of low bandwidth, such as a telephone
        gains[0] -= 20.0
        gains[-2:] -= 25.0
    at = np.linspace(0, BANDS - 1, len(spectrum))
    curve = 10 ** (np.interp(at, np.arange(BANDS), gains) / 20)
    return np.fft.irfft(spectrum * curve, size)[: len(samples)].astype(np.float32)


def reverberate(
    samples: FloatArray, chance: np.random.Generator, *, is_distant: bool = False
) -> FloatArray:
    """Add the echo of a random room; the sound keeps its length.

    The echo of a distant source is mostly louder than its direct sound, and decays later.
    """
    decay_s = chance.uniform(0.3, 0.9) if is_distant else chance.uniform(0.05, 0.35)
    count = int(decay_s * INPUT_SAMPLE_RATE)
    tail = chance.normal(0.0, 1.0, count) * np.exp(-6.9 * np.arange(count) / count)
    strength = chance.uniform(0.8, 2.5) if is_distant else chance.uniform(0.15, 0.6)
    tail *= strength / np.sqrt(np.square(tail).sum())
    tail[: INPUT_SAMPLE_RATE // 400] = 0.0
    tail[0] = 1.0
    size = _fast_size(len(samples) + count)
    product = np.fft.rfft(samples, size) * np.fft.rfft(tail, size)
    return np.fft.irfft(product, size)[: len(samples)].astype(np.float32)


def _fast_size(count: int) -> int:
    """Return the smallest power of two that is not below `count`: its transforms are fast."""
    return 1 << (count - 1).bit_length()


def normalise(samples: FloatArray, rms: float = 0.1) -> FloatArray:
    """Scale to an RMS, or to a lower RMS if the samples would clip."""
    level = float(np.sqrt(np.square(samples, dtype=np.float64).mean())) + 1e-9
    peak = float(np.abs(samples).max()) + 1e-9
    return (samples * min(rms / level, 0.98 / peak)).astype(np.float32)


def noise(count: int, chance: np.random.Generator) -> FloatArray:
    """Make `count` samples of one kind of noise with an RMS of 1."""
    kinds = (_coloured, _coloured, _hum, _tones, _bursts, _music)
    made = kinds[chance.integers(len(kinds))](count, chance)
    if chance.random() < 0.4:
        made = made + 0.5 * _coloured(count, chance)
    return (made / (np.sqrt(np.square(made).mean()) + 1e-9)).astype(np.float32)


def _seconds(count: int) -> NDArray[np.float64]:
    return np.arange(count) / INPUT_SAMPLE_RATE


def _coloured(count: int, chance: np.random.Generator) -> Array:
    """Noise from white to brown: its power falls with frequency, by a random exponent."""
    spectrum = np.fft.rfft(chance.standard_normal(count))
    frequency = np.maximum(np.fft.rfftfreq(count, 1 / INPUT_SAMPLE_RATE), 30.0)
    made = np.fft.irfft(spectrum * frequency ** -chance.uniform(0.0, 1.2), count)
    swell = 1 + 0.5 * np.sin(2 * np.pi * chance.uniform(0.05, 2.0) * _seconds(count))
    made = made * (swell if chance.random() < 0.4 else 1.0)
    return (made / (np.sqrt(np.square(made).mean()) + 1e-9)).astype(np.float32)


def _hum(count: int, chance: np.random.Generator) -> Array:
    base = (50.0, 60.0, 100.0, 120.0)[int(chance.integers(4))] * chance.uniform(0.98, 1.02)
    parts = [np.sin(2 * np.pi * base * number * _seconds(count)) / number for number in range(1, 9)]
    return np.asarray(np.sum(parts, axis=0), np.float32)


def _tones(count: int, chance: np.random.Generator) -> Array:
    """Beeps and frequency sweeps."""
    made = np.zeros(count, np.float32)
    start = 0
    while start < count:
        length = int(chance.uniform(0.1, 1.5) * INPUT_SAMPLE_RATE)
        stop = min(count, start + length)
        low, high = float(chance.uniform(150, 4000)), float(chance.uniform(150, 4000))
        if chance.random() < 0.6:
            high = low
        hertz = np.asarray(np.linspace(low, high, stop - start))
        phase = 2 * np.pi * np.cumsum(hertz) / INPUT_SAMPLE_RATE
        made[start:stop] = np.sin(phase) * (chance.random() < 0.6)
        start = stop
    return made


def _bursts(count: int, chance: np.random.Generator) -> Array:
    """Knocks and clicks."""
    made = np.zeros(count, np.float32)
    for _ in range(max(1, int(count / INPUT_SAMPLE_RATE * chance.uniform(0.5, 4.0)))):
        length = int(chance.uniform(0.005, 0.25) * INPUT_SAMPLE_RATE)
        start = int(chance.integers(max(1, count - length)))
        burst = _coloured(length, chance) * np.exp(-5 * np.arange(length) / length)
        made[start : start + length] += burst[: count - start].astype(np.float32)
    return made


def _music(count: int, chance: np.random.Generator) -> Array:
    """Chords of notes with harmonics and a decay."""
    made = np.zeros(count, np.float32)
    step = int(chance.uniform(0.2, 0.8) * INPUT_SAMPLE_RATE)
    for start in range(0, count, step):
        stop = min(count, start + 2 * step)
        at = np.arange(stop - start) / INPUT_SAMPLE_RATE
        for _ in range(int(chance.integers(1, 4))):
            pitch = 110.0 * 2 ** (int(chance.integers(0, 37)) / 12)
            for number in range(1, int(chance.integers(2, 7))):
                wave = np.sin(2 * np.pi * pitch * number * at) / number
                made[start:stop] += (wave * np.exp(-3 * at)).astype(np.float32)
    return made
