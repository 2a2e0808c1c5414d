"""Captured steps on a device: they choose what eager ones choose, and nothing waits in between."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from duplane.tools.replay.audio import read_audio
from duplane.worker.model import graphs
from duplane.worker.model.model import DuplexModel
from duplane.worker.model.types import ConversationOptions, DecodeMode, UnitInput, UnitOutput

PUBLIC = Path(__file__).parents[1] / "golden" / "public"
UNIT = 16_000
TALK = read_audio(PUBLIC / "audio" / "talk.wav", 12 * UNIT)
SLOTS = 4
SAMPLED = ConversationOptions(force_listen_count=0, temperature=0.9)
GREEDY = replace(SAMPLED, decode_mode=DecodeMode.GREEDY)
ROUNDS = ((0, 1, 2), (0,), (0, 1), (1, 3), (3,), (0, 1, 2, 3))

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@pytest.fixture(autouse=True)
def _always_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "WASTE", float("inf"))


def load(*, cuda_graphs: bool) -> DuplexModel:
    return DuplexModel.load(
        PUBLIC / "checkpoint",
        slot_count=SLOTS,
        context_capacity=1024,
        device="cuda",
        cuda_graphs=cuda_graphs,
    )


def play(model: DuplexModel) -> dict[int, list[tuple[Any, ...]]]:
    for slot in range(SLOTS):
        model.open(slot, replace(GREEDY if slot == 1 else SAMPLED, seed=slot))
    said: dict[int, list[tuple[Any, ...]]] = defaultdict(list)
    for second, slots in enumerate(ROUNDS):
        audio = TALK[second * UNIT :][:UNIT]
        for output in model.step([UnitInput(slot, audio) for slot in slots]):
            assert isinstance(output, UnitOutput), output
            said[output.slot].append((output.token_ids, output.audio_token_count))
        model.settle(slots)
    for slot in range(SLOTS):
        model.close(slot)
        assert model.is_clean(slot)
    return said


def test_replayed_steps_choose_what_eager_ones_choose() -> None:
    assert play(load(cuda_graphs=True)) == play(load(cuda_graphs=False))


def test_replays_leave_the_device_memory_as_it_was() -> None:
    model = load(cuda_graphs=True)
    for _ in range(3):
        play(model)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(10):
        play(model)
    torch.cuda.synchronize()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before


@contextmanager
def no_waits() -> Iterator[None]:
    """Raise where the host would wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("cuda_graphs", [False, True])
@torch.inference_mode()
def test_passes_of_the_decoders_do_not_wait(cuda_graphs: bool) -> None:
    model = load(cuda_graphs=cuda_graphs)
    embeds = torch.randn(SLOTS, model.llm.hidden_size, device="cuda")
    with no_waits():
        for _ in range(3):
            model.llm.feed([(slot, 1) for slot in range(SLOTS)], embeds)
        model.llm.feed_units([0, 2], [embeds, embeds[:2]])
    for slot in range(SLOTS):
        model.close(slot)


@torch.inference_mode()
def test_encoding_audio_does_not_wait() -> None:
    model = load(cuda_graphs=False)
    for slot in range(SLOTS):
        model.parts.audio.push(slot, TALK[: 2 * UNIT])
        model.parts.audio.take(slot)
    with no_waits():
        model.parts.audio.encode(range(SLOTS))
    for slot in range(SLOTS):
        model.close(slot)
