"""The features of a voice clip, compared with slow implementations of their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from duplane.worker.models.minicpm_o.vocoder.voice import prompt_mel, speaker_banks

Array = NDArray[np.float64]


def clip(samples: int, rate: int) -> Array:
    time = np.arange(samples) / rate
    noise = np.random.default_rng(1).normal(size=samples)
    return 0.3 * np.sin(2 * np.pi * (180 + 90 * time) * time) + 0.02 * noise + 0.01


def power_spectrum(frame: Array, size: int) -> Array:
    """Compute a Fourier transform by its definition."""
    turns = np.outer(np.arange(size // 2 + 1), np.arange(len(frame))) / size
    return (frame @ np.cos(2 * np.pi * turns).T) ** 2 + (frame @ np.sin(2 * np.pi * turns).T) ** 2


def slaney(hertz: float) -> float:
    """Map hertz to Slaney's mel: linear up to 1 kHz, logarithmic above."""
    if hertz < 1000:
        return hertz * 3 / 200
    return 15 + 27 * math.log(hertz / 1000) / math.log(6.4)


def hertz_of(mel: float) -> float:
    return mel * 200 / 3 if mel < 15 else 1000 * 6.4 ** ((mel - 15) / 27)


def triangle(left: float, centre: float, right: float, at: float) -> float:
    return max(0.0, min((at - left) / (centre - left), (right - at) / (right - centre)))


def slow_prompt_mel(samples: Array) -> Array:
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(1920) / 1920)
    mirrored = np.concatenate((samples[720:0:-1], samples, samples[-2:-722:-1]))
    edges = [hertz_of(slaney(8000) * n / 81) for n in range(82)]
    rows: list[list[float]] = []
    for start in range(0, len(mirrored) - 1920 + 1, 480):
        magnitude = np.sqrt(power_spectrum(mirrored[start : start + 1920] * window, 1920) + 1e-9)
        row: list[float] = []
        for left, centre, right in zip(edges, edges[1:], edges[2:], strict=False):
            weights = [triangle(left, centre, right, 12.5 * n) for n in range(961)]
            row.append(math.log(max(1e-5, 2 / (right - left) * float(magnitude @ weights))))
        rows.append(row)
    return np.array(rows)


def slow_speaker_banks(samples: Array) -> Array:
    def mel(hertz: float) -> float:
        return 1127 * math.log(1 + hertz / 700)

    window = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(400) / 399)) ** 0.85
    low, high = mel(20), mel(8000)
    edges = [low + (high - low) * n / 81 for n in range(82)]
    rows: list[list[float]] = []
    for start in range(0, len(samples) - 400 + 1, 160):
        frame = samples[start : start + 400]
        frame = frame - frame.mean()
        emphasised = np.array([x - 0.97 * frame[max(0, n - 1)] for n, x in enumerate(frame)])
        power = power_spectrum(emphasised * window, 512)
        row: list[float] = []
        for left, centre, right in zip(edges, edges[1:], edges[2:], strict=False):
            weights = [triangle(left, centre, right, mel(31.25 * n)) for n in range(257)]
            row.append(math.log(max(2**-23, float(power @ weights))))
        rows.append(row)
    return np.array(rows) - np.mean(rows, axis=0)


@pytest.mark.slow
def test_prompt_mel_equals_its_definition() -> None:
    samples = clip(5000, 24_000)
    slow = slow_prompt_mel(samples)
    fast = prompt_mel(torch.tensor(samples, dtype=torch.float32), len(slow))
    assert slow.shape == (10, 80)
    np.testing.assert_allclose(fast.numpy(), slow, atol=1e-4)


def test_prompt_mel_repeats_or_drops_frames_at_the_end() -> None:
    samples = torch.tensor(clip(5000, 24_000), dtype=torch.float32)
    whole = prompt_mel(samples, 10)
    longer, shorter = prompt_mel(samples, 12), prompt_mel(samples, 8)
    assert torch.equal(longer, torch.cat((whole, whole[-1:], whole[-1:])))
    assert torch.equal(shorter, whole[:8])


def test_the_prompt_mel_of_silence_is_the_floor() -> None:
    assert torch.equal(prompt_mel(torch.zeros(4800), 10), torch.full((10, 80), math.log(1e-5)))


def test_speaker_banks_equal_their_definition() -> None:
    samples = clip(2000, 16_000)
    slow = slow_speaker_banks(samples)
    fast = speaker_banks(torch.tensor(samples, dtype=torch.float32))
    assert slow.shape == (11, 80)
    np.testing.assert_allclose(fast.numpy(), slow, atol=2e-3)


def test_speaker_banks_have_zero_mean_and_do_not_depend_on_loudness() -> None:
    samples = torch.tensor(clip(4000, 16_000), dtype=torch.float32)
    banks = speaker_banks(samples)
    assert banks.mean(0).abs().max() < 1e-5
    assert (speaker_banks(samples * 0.5) - banks).abs().max() < 1e-2


def test_a_clip_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="720 samples at 24 kHz, at least 721"):
        prompt_mel(torch.zeros(720), 2)
    with pytest.raises(ValueError, match="399 samples at 16 kHz, at least 400"):
        speaker_banks(torch.zeros(399))
