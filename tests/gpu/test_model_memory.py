"""Device memory over many conversations, and what half precision on a device makes of them."""

from pathlib import Path

import pytest
import torch

from duplane.tools.replay.audio import read_audio
from duplane.worker.model.model import DuplexModel
from duplane.worker.model.types import (
    ConversationOptions,
    DecodeMode,
    UnitInput,
    UnitOutput,
    WindowMode,
)

PUBLIC = Path(__file__).parents[1] / "golden" / "public"
UNIT = 16_000
TALK = read_audio(PUBLIC / "audio" / "talk.wav", 8 * UNIT)
FRAME = (PUBLIC / "images" / "sq.png").read_bytes()
SLOTS = 4
GREEDY = ConversationOptions(
    decode_mode=DecodeMode.GREEDY,
    force_listen_count=0,
    seed=0,
    sliding_window_mode=WindowMode.CONTEXT,
    context_max_units=2,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@pytest.fixture(params=["float32", "bfloat16", "float16"])
def model(request: pytest.FixtureRequest) -> DuplexModel:
    """A model of four slots on the device."""
    return DuplexModel.load(
        PUBLIC / "checkpoint",
        slot_count=SLOTS,
        context_capacity=512,
        device="cuda",
        dtype=request.param,
    )


def converse(model: DuplexModel) -> list[tuple[int, ...]]:
    """One conversation per slot, with frames now and then; the ids of all."""
    ids: list[tuple[int, ...]] = []
    for slot in range(SLOTS):
        model.open(slot, GREEDY)
    for second in range(5):
        audio = TALK[second * UNIT : (second + 1) * UNIT]
        frames = (FRAME,) if second % 2 else ()
        for result in model.step([UnitInput(slot, audio, False, frames) for slot in range(SLOTS)]):
            assert isinstance(result, UnitOutput), result
            ids.append(result.token_ids)
        model.settle(range(SLOTS))
    for slot in range(SLOTS):
        model.close(slot)
        assert model.is_clean(slot)
    return ids


def test_conversations_leave_the_device_memory_as_it_was(model: DuplexModel) -> None:
    for _ in range(3):  # what libraries allocate once
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
