"""Sound of any rate becomes 16 kHz, whatever the lengths of its pieces."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest

from duplane.client.sound import Resampler, samples_of


def tone(rate: int, hertz: float, seconds: float = 0.25) -> array[float]:
    return array("f", np.sin(2 * np.pi * hertz * np.arange(int(rate * seconds)) / rate))


def middle(samples: array[float]) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Return the samples without their edges, where the filter sees silence."""
    return np.array(samples[100:-100], np.float32)


@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100, 48_000])
def test_tone_keeps_its_frequency_and_level(rate: int) -> None:
    made = middle(Resampler(rate).add(tone(rate, 440)))
    exact = np.sin(2 * np.pi * 440 * np.arange(100, 100 + len(made)) / 16_000)
    assert np.abs(made - exact).max() < 1e-3


def test_sound_above_the_new_rate_is_removed() -> None:
    assert np.abs(middle(Resampler(48_000).add(tone(48_000, 10_000)))).max() < 1e-4


def test_pieces_join_without_a_click() -> None:
    sound = tone(44_100, 1_000, 0.1)
    stream = Resampler(44_100)
    parts: array[float] = array("f")
    for at, length in [(0, 1), (1, 7), (8, 1_000), (1_008, 100_000)]:
        parts += stream.add(sound[at : at + length])
    assert parts == Resampler(44_100).add(sound)


def test_sound_of_16_khz_is_unchanged() -> None:
    sound = tone(16_000, 440)
    assert Resampler(16_000).add(sound) == sound


def test_sound_has_several_forms() -> None:
    levels = array("h", [0, 16_384, -32_768])
    exact = array("f", [0, 0.5, -1])
    # numpy declares its buffers for Python 3.12 and newer only.
    arrays: list[Any] = [np.array(levels), np.array(exact), np.array(exact, np.float64)]
    for sound in (levels, levels.tobytes(), exact, *arrays):
        assert samples_of(sound) == exact


@pytest.mark.parametrize(
    ("sound", "fault"),
    [
        (b"abc", "whole number"),
        (array("i", [1]), "must be int16 or float"),
        (np.zeros((2, 2), np.float32), "mono"),
        (array("f", [float("inf")]), "finite"),
    ],
    ids=["odd", "int32", "stereo", "infinite"],
)
def test_other_sound_is_refused(sound: bytes, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        samples_of(sound)


@pytest.mark.parametrize("rate", [0, 7_999, 192_001])
def test_rate_out_of_range_is_refused(rate: int) -> None:
    with pytest.raises(ValueError, match="rate is"):
        Resampler(rate)
