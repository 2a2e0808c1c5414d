"""Sounds at 16 kHz that are no speech, as float32 samples; each is made from a fixed seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

RATE_HERTZ = 16_000
SECONDS = 6
COUNT = SECONDS * RATE_HERTZ
STEP_S = 2.0

Samples = NDArray[np.floating[Any]]

_TIME_S = np.arange(COUNT) / RATE_HERTZ
_AFTER_STEP = _TIME_S > STEP_S


def _random() -> np.random.Generator:
    return np.random.default_rng(5)


def white(level: float = 0.1) -> Samples:
    """White noise."""
    return _random().standard_normal(COUNT) * level


def pink() -> Samples:
    """Noise with the same power in each octave."""
    spectrum = np.fft.rfft(_random().standard_normal(COUNT))
    noise = np.fft.irfft(spectrum / np.sqrt(np.arange(len(spectrum)) + 1), COUNT)
    return 0.1 * noise / noise.std()


def sine(hertz: float, level: float = 0.3) -> Samples:
    """One tone."""
    return level * np.sin(2 * np.pi * hertz * _TIME_S)


def hum(hertz: float) -> Samples:
    """A tone of the mains with its harmonics."""
    tones = [sine(hertz * n, 0.1 / n) for n in range(1, 12)]
    return np.sum(tones, axis=0)


def clicks() -> Samples:
    """Five single samples at full scale per second."""
    return np.where(np.arange(COUNT) % 3200 == 0, 0.9, 0.0)


def keyboard() -> Samples:
    """Keys that are pressed and released: two bursts of noise of 8 to 25 ms each."""
    random, sound, start = _random(), white(0.001), 0
    while (start := start + int(RATE_HERTZ * random.uniform(0.05, 0.25))) + 3000 < COUNT:
        for offset_s, level in ((0.0, 0.3), (random.uniform(0.04, 0.09), 0.15)):
            size = int(RATE_HERTZ * random.uniform(0.008, 0.025))
            burst = random.standard_normal(size) * np.exp(-4 * np.arange(size) / size)
            at = start + int(RATE_HERTZ * offset_s)
            sound[at : at + size] += level * burst
    return sound


NOISES: Mapping[str, Callable[[], Samples]] = {
    "silence": lambda: np.zeros(COUNT),
    "quiet noise": lambda: white(0.001),
    "white noise": lambda: white(),
    "pink noise": pink,
    "low tone": lambda: sine(120),
    "tone": lambda: sine(440),
    "tone in noise": lambda: sine(1000) + white(0.01),
    "beeps": lambda: sine(1000) * (np.sin(4 * np.pi * _TIME_S) > 0),
    "hum of 50 Hz": lambda: hum(50),
    "hum of 60 Hz": lambda: hum(60),
    "clicks": clicks,
    "keyboard": keyboard,
    "step of white noise": lambda: white(0.001) + _AFTER_STEP * white(),
    "step of pink noise": lambda: white(0.001) + _AFTER_STEP * pink(),
    "step of hum": lambda: white(0.001) + _AFTER_STEP * hum(50),
    "step of a tone": lambda: white(0.001) + _AFTER_STEP * sine(300),
    "step of a constant": lambda: 0.4 * _AFTER_STEP,
}
