"""Stages that need no result from the device do not wait for it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.paths import GOLDEN

from duplane.tools.golden_replay.audio import read_audio
from duplane.worker.models.minicpm_o.model import DuplexModel
from duplane.worker.models.minicpm_o.vocoder.hift_stream import MelChunk
from duplane.worker.models.minicpm_o.vocoder.types import VocoderChunk
from duplane.worker.models.minicpm_o.vocoder.vocoder import Vocoder
from duplane.worker.models.types import ConversationOptions

UNIT = 16_000
TALK = read_audio(GOLDEN / "audio" / "talk.wav", 2 * UNIT)
SLOTS = 4
TOKENS = list(range(28))

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=[True, False], ids=["graphs", "eager"])
def loaded(request: pytest.FixtureRequest, speaking_checkpoint: Path) -> DuplexModel:
    return DuplexModel.load(
        speaking_checkpoint,
        slot_count=SLOTS,
        context_capacity=512,
        device="cuda:0",
        cuda_graphs=request.param,
    )


@pytest.fixture
def model(loaded: DuplexModel) -> Iterator[DuplexModel]:
    """Return a model with a conversation in every slot."""
    for slot in range(SLOTS):
        loaded.open(slot, ConversationOptions(seed=slot))
    yield loaded
    for slot in range(SLOTS):
        loaded.close(slot)


@contextmanager
def no_waits() -> Iterator[None]:
    """Raise an error if the host waits for the device."""
    try:
        _set_sync_debug_mode("error")
        yield
    finally:
        _set_sync_debug_mode("default")


def _set_sync_debug_mode(mode: str) -> None:
    """Set torch's mode of finding waits, without the warning that this mode is a prototype."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode(mode)


def test_a_wait_is_found_and_the_mode_is_left_again() -> None:
    there = torch.ones(3, device="cuda:0")
    with pytest.raises(RuntimeError, match="synchronizing"), no_waits():
        there.cpu()
    assert there.cpu().sum() == 3


@torch.inference_mode()
def test_passes_of_the_decoder(model: DuplexModel) -> None:
    embeds = torch.randn(SLOTS, model.llm.hidden_size, device="cuda:0")
    with no_waits():
        for _ in range(3):
            model.llm.feed([(slot, 1) for slot in range(SLOTS)], embeds)


@torch.inference_mode()
def test_audio(model: DuplexModel) -> None:
    audio: Any = model.parts.audio
    for slot in range(SLOTS):
        audio.mel.push(slot, TALK)
        audio.mel.take(slot)
    with no_waits():
        audio.encode(range(SLOTS))


@torch.inference_mode()
def test_settle(model: DuplexModel) -> None:
    embeds = model.llm.embed([1, 2] * SLOTS)
    with no_waits():
        model.llm.append([(slot, 2) for slot in range(SLOTS)], embeds)


@pytest.mark.parametrize("slots", [(0,), (0, 1, 2), (1, 3)])
@torch.inference_mode()
def test_flow(model: DuplexModel, slots: tuple[int, ...]) -> None:
    vocoder = model.parts.vocoder
    assert isinstance(vocoder, Vocoder)
    with no_waits():
        for is_last in (False, True):
            vocoder.encode([VocoderChunk(slot, TOKENS, is_last) for slot in slots])


@pytest.mark.parametrize("slots", [(0,), (0, 1, 2), (1, 3)])
@torch.inference_mode()
def test_hift(model: DuplexModel, slots: tuple[int, ...]) -> None:
    vocoder = model.parts.vocoder
    assert isinstance(vocoder, Vocoder)
    mel = torch.randn(50, vocoder.limits.mel_width, device="cuda:0")
    chunks = [MelChunk(slot, mel, slot == 0, False, None) for slot in slots]
    with no_waits():
        launched = [vocoder.stream.launch([chunk]) for chunk in chunks]
    assert all(len(download.result()[0]) > 50 * 400 for download in launched)
