"""Launches of the audio encoder: one transfer on a fake device, and the embeddings as alone."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from support.model.fake_cuda import DEVICE, Way, elsewhere
from support.model.launches import LaunchWatch, groupings
from torch import Tensor

from duplane.tools.bench.launches import LaunchCount
from duplane.worker.models.minicpm_o.audio.encoder import LAUNCH_UNITS, AudioEncoder
from duplane.worker.models.minicpm_o.audio.whisper import AudioConfig

pytestmark = pytest.mark.slow

SLOTS, UNITS = 17, 3  # all slots need two launches of the largest size, and a third one
CONFIG = AudioConfig(
    mel_bins=80,
    width=32,
    layer_count=2,
    head_count=4,
    ffn_width=64,
    position_count=150,  # the cache begins anew after two units
    hidden=48,
    pool=5,
    chunk_positions=50,
)


@torch.no_grad()
def build(device: str) -> AudioEncoder:
    encoder = AudioEncoder(CONFIG, SLOTS, device)
    generator = torch.Generator().manual_seed(0)
    for parameter in encoder.parameters():
        fan_in = parameter[0].numel() if parameter.ndim > 1 else 25
        values = torch.randn(parameter.shape, generator=generator) / fan_in**0.5
        parameter.copy_(values.to(device))
    return encoder


def push(encoder: AudioEncoder, slot: int, number: int) -> None:
    sound = np.random.default_rng([slot, number]).normal(0, 0.1, 16_000).astype(np.float32)
    assert encoder.mel.push(slot, sound)
    encoder.mel.take(slot)


def encode(encoder: AudioEncoder, steps: Sequence[Sequence[int]]) -> list[list[Tensor]]:
    """Encode units; each step has the slots whose next units are encoded together."""
    found: list[list[Tensor]] = [[] for _ in range(SLOTS)]
    for slots in steps:
        for slot in slots:
            push(encoder, slot, len(found[slot]))
        for slot, rows in zip(slots, encoder.encode(slots), strict=True):
            found[slot].append(rows.cpu())
    for slot in range(SLOTS):
        encoder.reset(slot)
        assert encoder.is_clean(slot)
    return found


def assert_equal_rows(
    found: Sequence[Sequence[Tensor]], expected: Sequence[Sequence[Tensor]]
) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        for one, other in zip(ours, theirs, strict=False):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def here() -> AudioEncoder:
    return build("cpu")


@pytest.fixture(scope="module")
def alone(here: AudioEncoder) -> list[list[Tensor]]:
    """Return the embeddings of every unit, encoded alone on the CPU."""
    return encode(here, [(slot,) for slot in range(SLOTS) for _ in range(UNITS)])


@pytest.mark.parametrize("has_buckets", [False, True], ids=["real sizes", "padded"])
@settings(max_examples=4, deadline=None)
@given(steps=groupings([UNITS] * SLOTS))
def test_any_grouping_gives_each_slot_the_embeddings_that_it_has_alone(
    here: AudioEncoder, alone: list[list[Tensor]], has_buckets: bool, steps: list[list[int]]
) -> None:
    here.has_buckets = has_buckets
    try:
        assert_equal_rows(encode(here, steps), alone)
    finally:
        here.has_buckets = False


def test_replayed_launches_have_one_transfer_fixed_addresses_and_the_same_embeddings(
    alone: list[list[Tensor]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with elsewhere() as border, torch.inference_mode():
        there = build(DEVICE)
        watch = LaunchWatch(monkeypatch, lambda: (there.cache, there.mel.samples, there.mel.peaks))
        there.capture()
        assert not caplog.records
        assert watch.captures == len(LAUNCH_UNITS)
        assert all(there.is_clean(slot) for slot in range(SLOTS))
        steps = [[*range(SLOTS)], (3, 1, 9), (2,), [*range(SLOTS - 1)]]
        assert_equal_rows(encode(there, steps), alone)
        assert watch.has_fixed_addresses

        for slot in (5, 2):
            push(there, slot, 0)
        border.crossings.clear()
        watch.replays = 0
        with watch:
            there.encode((5, 2))
        crossed = [(each.way, each.where) for each in border.crossings]
        assert crossed == [(Way.UP, "transfer.py refill")]
        assert watch.replays == 1
        assert watch.made == ["aten::clone"], "embeddings outlive the next launch"


def test_a_padded_launch_has_as_many_kernels_for_eight_units_as_for_one(
    here: AudioEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(here, "has_buckets", True)
    counts: list[int] = []
    for slots in ([0], [*range(8)]):
        for slot in slots:
            push(here, slot, 0)
        watch: Any = SimpleNamespace(running=None)
        with LaunchCount(watch) as count:
            here.encode(slots)
        counts.append(sum(count.launches.values()))
        for slot in slots:
            here.reset(slot)
    assert counts[0] == counts[1] <= 110
