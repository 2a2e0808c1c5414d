"""Launches of flow and HiFT: few transfers on a fake device, and the samples of turns alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from support.model.fake_cuda import DEVICE, Border, Way, elsewhere
from support.model.launches import LaunchWatch, groupings
from support.paths import GOLDEN
from support.speech import assert_sounds_equal

from duplane.tools.bench.launches import LaunchCount
from duplane.worker.models.minicpm_o.vocoder.types import (
    VocoderChunk,
    VocoderOptions,
    VocoderVoice,
)
from duplane.worker.models.minicpm_o.vocoder.vocoder import Vocoder

pytestmark = pytest.mark.slow

SLOTS = 3
# The prompt frames of each slot's voice, and the tokens of the chunks of its turn.
TURNS = (
    (20, (28, 28, 28, 20)),
    (60, (9, 28, 28, 27)),
    (50, (28, 12, 1)),
)


def load(device: str) -> Vocoder:
    options = VocoderOptions(max_prompt_frames=60)
    return Vocoder.load(GOLDEN / "token2wav", slot_count=SLOTS, device=device, options=options)


def voice(slot: int) -> VocoderVoice:
    draw, frames = np.random.default_rng(slot), TURNS[slot][0]
    return VocoderVoice(
        draw.integers(0, 6561, frames // 2),
        draw.normal(-6.0, 2.0, (frames, 80)).astype(np.float32),
        draw.normal(size=192).astype(np.float32),
    )


def chunk(slot: int, number: int) -> VocoderChunk:
    counts = TURNS[slot][1]
    tokens = np.random.default_rng(10 * slot + number).integers(0, 6561, counts[number])
    return VocoderChunk(slot, tokens.tolist(), is_last=number == len(counts) - 1)


def decode_turns(vocoder: Vocoder, steps: Sequence[Sequence[int]]) -> list[list[np.ndarray]]:
    """Decode turns; each step has the slots whose next chunks are decoded together."""
    for slot in range(SLOTS):
        vocoder.reset(slot)
        vocoder.prime(slot, voice(slot), seed=slot)
    found: list[list[np.ndarray]] = [[] for _ in TURNS]
    for slots in steps:
        going = [slot for slot in slots if len(found[slot]) < len(TURNS[slot][1])]
        chunks = [chunk(slot, len(found[slot])) for slot in going]
        for slot, samples in zip(going, vocoder.decode(chunks), strict=True):
            found[slot].append(samples)
    return found


@pytest.fixture(scope="module")
def here() -> Vocoder:
    return load("cpu")


@pytest.fixture(scope="module")
def alone(here: Vocoder) -> list[list[np.ndarray]]:
    """Return the samples of every chunk, computed alone on the CPU."""
    return decode_turns(here, [(slot,) for slot in range(SLOTS) for _ in range(4)])


def assert_equal_turns(
    found: Sequence[Sequence[np.ndarray]], expected: Sequence[Sequence[np.ndarray]]
) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        for one, other in zip(ours, theirs, strict=False):
            assert_sounds_equal(one, other)


@pytest.mark.parametrize("is_static", [False, True], ids=["real sizes", "padded"])
@settings(max_examples=6, deadline=None)
@given(steps=groupings([len(counts) for _, counts in TURNS]))
def test_any_grouping_gives_each_turn_the_samples_that_it_has_alone(
    here: Vocoder, alone: list[list[np.ndarray]], is_static: bool, steps: list[list[int]]
) -> None:
    here.is_static = here.stream.has_buckets = is_static
    try:
        assert_equal_turns(decode_turns(here, steps), alone)
    finally:
        here.is_static = here.stream.has_buckets = False


@pytest.fixture(scope="module")
def border() -> Iterator[Border]:
    with elsewhere() as border, torch.inference_mode():
        yield border


def test_replayed_launches_have_few_transfers_fixed_addresses_and_the_same_samples(
    border: Border,
    alone: list[list[np.ndarray]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    there = load(DEVICE)
    watch = LaunchWatch(monkeypatch, lambda: (*there.live.tensors, *there.stream.tensors))
    there.capture()
    assert not caplog.records
    assert watch.captures == 3 * 2 + 3 * 2 * 2  # flow: rows, tokens; HiFT: rows, frames, first
    assert all(there.is_clean(slot) for slot in range(SLOTS))
    steps = [(0, 1, 2), (2, 0), (1,), (0, 1, 2), (1, 0)]
    assert_equal_turns(decode_turns(there, steps), alone)
    assert watch.has_fixed_addresses

    decode_turns(there, [(0, 2)])
    chunks = [chunk(0, 1), chunk(2, 1)]
    border.crossings.clear()
    watch.replays = 0
    with watch:
        mels = there.encode(chunks)
        assert [(each.way, each.where) for each in border.crossings] == [
            (Way.UP, "transfer.py refill")
        ]
        there.decode_mel(chunks, mels)
    assert watch.replays == 3, "flow for both, HiFT for a chunk of 50 frames and one of 18"
    assert watch.made == ["aten::clone"], "mel outlives the next launch"


def test_a_padded_launch_has_few_kernels_and_hardly_more_for_four_turns_than_for_one(
    here: Vocoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(here, "is_static", True)
    monkeypatch.setattr(here.stream, "has_buckets", True)
    counts: list[tuple[int, int]] = []
    for slots in ((0,), (0, 1, 2)):  # three rows are padded to four
        decode_turns(here, [])
        chunks = [VocoderChunk(slot, [slot] * 20, is_last=False) for slot in slots]
        watch: Any = SimpleNamespace(running=None)
        with LaunchCount(watch) as flow:
            mels = here.encode(chunks)
        with LaunchCount(watch) as hift:
            here.decode_mel(chunks, mels)
        counts.append((sum(flow.launches.values()), sum(hift.launches.values())))
    # The columns of more turns are moved in more parts.
    for one, four, most in zip(*counts, (850, 680), strict=True):
        assert one <= four <= min(most, one + 10)
