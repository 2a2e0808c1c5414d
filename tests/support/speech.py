"""Makes synthetic sound that resembles speech: voiced syllables, pauses and some noise."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray


def speech_like(seconds: float, rate_hertz: int = 16_000, seed: int = 0) -> NDArray[np.float32]:
    """Return mono float32 samples: harmonics of a moving pitch, four syllables per second, and a
    pause every few seconds."""
    random = np.random.default_rng(seed)
    time_s = np.arange(int(seconds * rate_hertz)) / rate_hertz
    pitch = 120 + 30 * np.sin(2 * np.pi * 0.4 * time_s)
    phase = 2 * np.pi * np.cumsum(pitch) / rate_hertz
    voice = sum(np.sin(n * phase) / n for n in range(1, 12))
    syllables = np.clip(np.sin(2 * np.pi * 4 * time_s), 0, 1)
    talking = (np.sin(2 * np.pi * time_s / 5) > -0.5).astype(np.float64)
    noise = random.normal(0, 0.002, time_s.size)
    return (0.15 * voice * syllables * talking + noise).astype(np.float32)


def assert_sounds_equal(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> None:
    """Assert that two waves are equal except for rounding.

    Another batch or processor changes the last digits of the pitch, and the phase sums these
    changes over a second. So single samples may differ more than the average.
    """
    assert ours.shape == theirs.shape
    if ours.size:
        apart = ours - theirs
        assert np.abs(apart).max() < 5e-2
        assert np.sqrt(np.mean(apart**2)) < 2e-3


def assert_probabilities_equal(one: float | None, other: float | None) -> None:
    """Check that two runs in float32 draw with equal probability, or that neither draws."""
    assert (one is None) == (other is None)
    if one is not None and other is not None:
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)
