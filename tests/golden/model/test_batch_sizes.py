"""Convolutions have few shapes on a GPU, and all of them run when the model is loaded."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.model.shapes import Shapes
from support.paths import GOLDEN
from support.speech import assert_sounds_equal

from duplane.tools.golden_replay.audio import read_audio
from duplane.worker.models.minicpm_o.batch_sizes import padded_size, padded_sizes
from duplane.worker.models.minicpm_o.model import DuplexModel
from duplane.worker.models.minicpm_o.vocoder.hift_stream import FRAME_BUCKETS, HiFTStream, MelChunk
from duplane.worker.models.minicpm_o.vocoder.source_noise import NoiseCounter
from duplane.worker.models.minicpm_o.vocoder.vocoder import Vocoder
from duplane.worker.models.types import ConversationOptions, Unit, UnitOutput

UNIT = 16_000
TALK = read_audio(GOLDEN / "audio" / "talk.wav", 40 * UNIT)
SLOTS, ROUNDS = 6, 6


@pytest.fixture(scope="module")
def loaded(speaking_checkpoint: Path) -> DuplexModel:
    return DuplexModel.load(speaking_checkpoint, slot_count=SLOTS, context_capacity=512)


@pytest.fixture
def stream(loaded: DuplexModel) -> Iterator[HiFTStream]:
    """Yield the stream of the model, which pads its batches as on a GPU."""
    assert isinstance(loaded.parts.vocoder, Vocoder)
    stream = loaded.parts.vocoder.stream
    stream.has_buckets = loaded.parts.audio.has_buckets = True
    yield stream
    stream.has_buckets = loaded.parts.audio.has_buckets = False
    with torch.inference_mode():
        for tensor in stream.tensors:
            tensor.zero_()


def play(model: DuplexModel) -> list[UnitOutput]:
    """Run random subsets of conversations that speak and end turns."""
    draw = random.Random(0)
    for slot in range(SLOTS):
        model.open(slot, ConversationOptions(seed=slot, force_listen_count=0))
    outputs: list[UnitOutput] = []
    for second in range(ROUNDS):
        slots = draw.sample(range(SLOTS), draw.randint(1, SLOTS))
        units = [Unit(slot, TALK[(3 * slot + second) * UNIT :][:UNIT]) for slot in sorted(slots)]
        for output in model.step(units):
            assert isinstance(output, UnitOutput), output
            outputs.append(output)
        model.settle(slots)
    for slot in range(SLOTS):
        model.close(slot)
    return sorted(outputs, key=lambda output: output.slot)


def test_no_running_unit_meets_a_convolution_of_a_new_shape(
    loaded: DuplexModel, stream: HiFTStream
) -> None:
    with Shapes("conv") as warm:
        loaded.parts.audio.warm_up()
        stream.warm_up()
    lengths, batches = len(FRAME_BUCKETS) * 2, len(padded_sizes(SLOTS))
    first: Any = stream.hift.f0_predictor.condnet[0]
    of_first = {shape for shape in warm.found if shape[2] == tuple(first.weight.shape)}
    assert len(of_first) == lengths * batches
    assert all(loaded.parts.vocoder.is_clean(slot) for slot in range(SLOTS))  # type: ignore[union-attr]  has a vocoder
    with Shapes("conv") as running:
        outputs = play(loaded)
    assert len({len(output.audio) for output in outputs}) >= 3, "chunks had too few lengths"
    assert running.found
    assert running.found - warm.found == set()


def test_padded_batches_give_the_same_results(loaded: DuplexModel, stream: HiFTStream) -> None:
    padded = play(loaded)
    stream.has_buckets = loaded.parts.audio.has_buckets = False
    for output, expected in zip(padded, play(loaded), strict=True):
        assert output.token_ids == expected.token_ids
        assert_sounds_equal(output.audio, expected.audio)


@torch.inference_mode()
def test_chunks_padded_to_one_length_sound_and_leave_state_as_alone(stream: HiFTStream) -> None:
    """Chunks of a turn: the first, one that continues it, and the last one."""
    generator = torch.Generator().manual_seed(0)
    frames_of_slot = ((50, 50, 56), (30, 50, 2), (14, 50, 20), (10, 50, 50), (50, 50, 34))
    heard: dict[bool, list[np.ndarray]] = {True: [], False: []}
    rounds: list[list[MelChunk]] = []
    for number in range(3):
        chunks: list[MelChunk] = []
        for slot, frames in enumerate(frames_of_slot):
            mel = torch.randn(frames[number], 80, generator=generator)
            noise = NoiseCounter.of_seed(100 * slot + number)
            chunks.append(MelChunk(slot, mel, number == 0, number == 2, noise))
        rounds.append(chunks)
    states: dict[bool, list[torch.Tensor]] = {}
    for has_buckets in (True, False):
        stream.has_buckets = has_buckets
        for chunks in rounds:
            heard[has_buckets] += stream.decode(chunks)
        states[has_buckets] = [tensor.clone() for tensor in stream.tensors]
    for ours, theirs in zip(heard[True], heard[False], strict=True):
        assert_sounds_equal(ours, theirs)
    for ours, theirs in zip(states[True], states[False], strict=True):
        torch.testing.assert_close(ours, theirs, atol=5e-3, rtol=0)


def test_padded_sizes_are_powers_of_two() -> None:
    assert [padded_size(count) for count in (1, 2, 3, 4, 5, 64)] == [1, 2, 4, 4, 8, 64]
    assert padded_sizes(1) == [1]
    assert padded_sizes(6) == [1, 2, 4, 8]
    assert padded_sizes(64) == [1, 2, 4, 8, 16, 32, 64]
