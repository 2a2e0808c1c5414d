"""Launches of HiFT on a fake device: few transfers, fixed addresses, and the samples of a CPU."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.model.fake_cuda import DEVICE, Border, Way, elsewhere
from support.model.launches import LaunchWatch
from support.paths import GOLDEN
from support.speech import assert_sounds_equal
from torch import Tensor

from duplane.worker.models.minicpm_o.blocks import graph
from duplane.worker.models.minicpm_o.vocoder.files import load_hift
from duplane.worker.models.minicpm_o.vocoder.hift_stream import HiFTStream, MelChunk
from duplane.worker.models.minicpm_o.vocoder.source_noise import NoiseCounter

pytestmark = pytest.mark.slow

SLOTS = 3
FORMS = 3 * 2 * 2  # numbers of rows, numbers of frames, first or not
# The mel frames of the chunks of each slot's turn.
TURNS = ((50, 50, 12), (20, 50, 56), (50, 16, 50, 2))


def load(device: str) -> HiFTStream:
    place = torch.device(device)
    with torch.inference_mode():
        return HiFTStream(load_hift(GOLDEN / "token2wav", device=place), SLOTS, place)


def chunk(slot: int, number: int, device: str) -> MelChunk:
    lengths = TURNS[slot]
    made = np.random.default_rng(10 * slot + number).normal(-6.0, 2.0, (lengths[number], 80))
    noise = NoiseCounter.of_seed(100 * slot + number)
    is_last = number == len(lengths) - 1
    mel = torch.tensor(made.astype(np.float32)).to(device)
    return MelChunk(slot, mel, number == 0, is_last, noise)


@pytest.fixture(scope="module")
def border() -> Iterator[Border]:
    with elsewhere() as border, torch.inference_mode():
        yield border


@pytest.fixture(scope="module")
def stream(border: Border) -> HiFTStream:
    """Return a stream on the fake device, with its graphs."""
    stream = load(DEVICE)
    stream.capture(has_noise=True)
    return stream


@pytest.fixture(scope="module")
def alone() -> list[list[np.ndarray]]:
    """Return the samples of every chunk of every slot, computed alone on the CPU."""
    stream = load("cpu")
    with torch.inference_mode():
        return [
            [stream.decode([chunk(slot, number, "cpu")])[0] for number in range(len(turn))]
            for slot, turn in enumerate(TURNS)
        ]


def test_a_launch_has_one_upload_and_one_download_and_waits_only_for_the_latter(
    border: Border, stream: HiFTStream
) -> None:
    chunks = [chunk(slot, 0, DEVICE) for slot in (0, 2)]
    border.crossings.clear()
    stream.decode(chunks)
    assert [(crossing.way, crossing.where) for crossing in border.crossings] == [
        (Way.UP, "transfer.py refill"),
        (Way.SENT, "transfer.py __init__"),
        (Way.DOWN, "transfer.py result"),
    ]


def test_after_the_capture_no_launch_makes_a_tensor_or_changes_an_address(
    border: Border, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = load(DEVICE)
    watch = LaunchWatch(monkeypatch, lambda: stream.tensors)
    stream.capture(has_noise=True)
    assert watch.captures == FORMS
    chunks = [[chunk(slot, number, DEVICE) for slot in range(SLOTS)] for number in range(3)]
    with watch:
        for together in chunks:
            stream.decode(together)
    assert watch.made == []
    assert watch.has_fixed_addresses


def decode_turns(
    stream: HiFTStream, device: str, steps: Sequence[Sequence[int]]
) -> list[list[np.ndarray]]:
    """Decode all turns; each step has the slots whose next chunks are decoded together."""
    with torch.inference_mode():
        for tensor in stream.tensors:
            tensor.zero_()
        found: list[list[np.ndarray]] = [[] for _ in TURNS]
        for slots in steps:
            chunks = [
                chunk(slot, len(found[slot]), device)
                for slot in slots
                if len(found[slot]) < len(TURNS[slot])
            ]
            for one, samples in zip(chunks, stream.decode(chunks), strict=True):
                found[one.slot].append(samples)
        return found


def assert_equal_turns(
    found: Sequence[Sequence[np.ndarray]], expected: Sequence[Sequence[np.ndarray]]
) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        for one, other in zip(ours, theirs, strict=False):
            assert_sounds_equal(one, other)


def test_replayed_launches_have_the_samples_of_chunks_alone(
    border: Border, stream: HiFTStream, alone: list[list[np.ndarray]]
) -> None:
    steps = [(0,), (2, 0), (1, 2), (0, 1, 2), (1, 2)]
    found = decode_turns(stream, DEVICE, steps)
    assert [len(each) for each in found] == [3, 3, 4]
    assert_equal_turns(found, alone)


ORDERS = st.lists(
    st.permutations(range(SLOTS)).flatmap(
        lambda slots: st.integers(1, SLOTS).map(lambda count: slots[:count])
    ),
    min_size=3,
    max_size=5,
)


@pytest.fixture(scope="module")
def here() -> HiFTStream:
    return load("cpu")


@pytest.mark.parametrize("has_buckets", [True, False], ids=["padded", "real sizes"])
@settings(max_examples=10, deadline=None)
@given(steps=ORDERS)
def test_any_grouping_gives_each_turn_the_samples_that_it_has_alone(
    here: HiFTStream, alone: list[list[np.ndarray]], has_buckets: bool, steps: list[list[int]]
) -> None:
    here.has_buckets = has_buckets
    assert_equal_turns(decode_turns(here, "cpu", steps), alone)


def test_a_batch_that_fails_can_be_decoded_again(
    here: HiFTStream, alone: list[list[np.ndarray]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first group of a batch is computed; the second one fails."""
    here.has_buckets = False
    decode_turns(here, "cpu", [(0, 1)])
    generate, calls = here.hift.forward, list[int]()

    def failing(*arguments: Any) -> Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return generate(*arguments)

    with torch.inference_mode():
        chunks = [chunk(0, 1, "cpu"), chunk(2, 0, "cpu")]
        monkeypatch.setattr(here.hift, "forward", failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            here.decode(chunks)
        monkeypatch.undo()
        for one, samples in zip(chunks, here.decode(chunks), strict=True):
            assert_sounds_equal(samples, alone[one.slot][0 if one.is_first else 1])


def test_graphs_that_differ_or_cannot_be_captured_do_not_serve(
    border: Border,
    alone: list[list[np.ndarray]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    capture: Any = graph.Graph
    count = 0

    def faulty(call: Callable[[], None], pool: Any = None) -> Any:
        nonlocal count
        count += 1
        if count % 3 == 0:
            raise RuntimeError("operation not permitted when stream is capturing")
        captured = capture(call, pool)
        staged: Any = call.__self__  # type: ignore[attr-defined]  a method

        def replay() -> None:
            captured.replay()
            staged.result.mul_(1.1)

        return captured if count % 3 == 1 else SimpleNamespace(pool=None, replay=replay)

    stream = load(DEVICE)
    monkeypatch.setattr(graph, "Graph", faulty)
    with caplog.at_level(logging.WARNING):
        stream.capture(has_noise=True)
    (record,) = caplog.records
    assert record.getMessage().startswith(f"8 of {FORMS} CUDA graphs of HiFT are switched off, ")
    assert not any(tensor.any() for tensor in stream.tensors)
    steps = random.Random(0).choices([(0, 1, 2), (1, 0), (2,)], k=6)
    assert_equal_turns(decode_turns(stream, DEVICE, steps), alone)
