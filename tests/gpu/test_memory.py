"""Conversations leave no device memory behind, and equal ones stay equal in half precision."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.paths import GOLDEN

from duplane.tools.golden_replay.audio import read_audio
from duplane.worker.models.minicpm_o.model import DuplexModel
from duplane.worker.models.types import (
    ConversationOptions,
    DecodeMode,
    Unit,
    UnitOutput,
    WindowMode,
)

UNIT = 16_000
TALK = read_audio(GOLDEN / "audio" / "talk.wav", 8 * UNIT)
FRAME = (GOLDEN / "images" / "sq.png").read_bytes()
SLOTS = 4
GREEDY = ConversationOptions(
    decode_mode=DecodeMode.GREEDY,
    force_listen_count=0,
    seed=0,
    sliding_window_mode=WindowMode.CONTEXT,
    context_max_units=2,
)

HAS_CUDA = torch.cuda.is_available()

pytestmark = pytest.mark.gpu


@pytest.fixture(params=["float32", "bfloat16", "float16"] if HAS_CUDA else ["bfloat16"])
def model(request: pytest.FixtureRequest, speaking_checkpoint: Path) -> DuplexModel:
    """Return a model with four slots on the device."""
    return DuplexModel.load(
        speaking_checkpoint,
        slot_count=SLOTS,
        context_capacity=512,
        device="cuda:0",
        dtype=request.param,
    )


def converse(model: DuplexModel) -> list[tuple[int, ...]]:
    """Run one conversation per slot, with frames in some units; return the ids of every output."""
    ids: list[tuple[int, ...]] = []
    for slot in range(SLOTS):
        model.open(slot, GREEDY)
    for second in range(5):
        audio = TALK[second * UNIT : (second + 1) * UNIT]
        frames = (FRAME,) if second % 2 else ()
        for result in model.step([Unit(slot, audio, False, frames) for slot in range(SLOTS)]):
            assert isinstance(result, UnitOutput), result
            ids.append(result.token_ids)
        model.settle(range(SLOTS))
    for slot in range(SLOTS):
        model.close(slot)
        assert model.is_clean(slot)
    return ids


@pytest.mark.skipif(not HAS_CUDA, reason="there is no CUDA device")
def test_conversations_leave_the_device_memory_as_it_was(model: DuplexModel) -> None:
    for _ in range(3):  # libraries allocate some memory in the first runs only
        converse(model)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(25):
        converse(model)
    torch.cuda.synchronize()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before


def test_equal_conversations_stay_equal_in_their_slots(model: DuplexModel) -> None:
    ids = converse(model)
    for start in range(0, len(ids), SLOTS):
        assert len(set(ids[start : start + SLOTS])) == 1
