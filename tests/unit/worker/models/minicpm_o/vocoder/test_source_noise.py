"""The source noise: normal, the same on every device, and continued from any sample."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from support.model.fake_cuda import DEVICE, elsewhere

from duplane.worker.models.minicpm_o.vocoder.source_noise import NoiseCounter, NoiseTable

CPU = torch.device("cpu")
COUNT = 50_000


def counter(seed: int, position: int = 0) -> NoiseCounter:
    made = NoiseCounter.of_seed(seed)
    made.position = position
    return made


def noise_of(
    counters: Sequence[NoiseCounter], samples: int, device: torch.device = CPU
) -> torch.Tensor:
    numbers = torch.tensor([counter.numbers for counter in counters]).to(device)
    return NoiseTable(device).noise(numbers, samples)


def test_the_noise_of_a_seed_is_always_the_same() -> None:
    noise = noise_of([counter(0), counter(1, 2**32 - 1)], 3)
    expected = [[-0.14951244, -0.24730493, 0.16911346], [0.19220714, -0.44081417, -1.65054667]]
    np.testing.assert_allclose(noise, expected, rtol=1e-6)


def test_every_device_has_the_same_noise() -> None:
    counters = [counter(3), counter(4, 2**40)]
    with elsewhere():
        there = noise_of(counters, 1000, torch.device(DEVICE)).cpu()
    assert torch.equal(there, noise_of(counters, 1000))


def test_noise_is_continued_from_a_number() -> None:
    whole = noise_of([counter(5)], 1000)
    assert torch.equal(noise_of([counter(5, 600)], 400), whole[:, 600:])


@pytest.mark.parametrize("seed", [0, 1, 2**62])
def test_noise_is_normal_and_has_no_echo(seed: int) -> None:
    own, other = noise_of([counter(seed), counter(seed + 1)], COUNT).double()
    assert abs(float(own.mean())) < 0.02
    assert abs(float(own.std()) - 1) < 0.02
    assert abs(float((own**4).mean()) - 3) < 0.15
    assert abs(float((own * other).mean())) < 0.02
    for step in (1, 2, 3, 480):
        assert abs(float((own[step:] * own[:-step]).mean())) < 0.02


def test_without_a_seed_each_conversation_has_noise_of_its_own() -> None:
    counters = [NoiseCounter.of_seed(None) for _ in range(2)]
    first, second = noise_of(counters, 100)
    assert not torch.equal(first, second)
