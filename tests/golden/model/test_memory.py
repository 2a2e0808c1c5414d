"""The memory in use does not grow over hundreds of conversations."""

import gc
from dataclasses import replace

import psutil
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
TALK = read_audio(GOLDEN / "audio" / "talk.wav", 4 * UNIT)
FRAME = (GOLDEN / "images" / "small.png").read_bytes()
CONVERSATIONS = 400
AT_ONCE = 4
MEBIBYTE = 1 << 20
SILENT = ConversationOptions(
    "Short.",
    generate_audio=False,
    decode_mode=DecodeMode.GREEDY,
    force_listen_count=0,
    sliding_window_mode=WindowMode.CONTEXT,
    context_max_units=1,
)


def converse(model: DuplexModel, *, number: int) -> None:
    """Run four conversations of one or two units; some generate audio, some get pictures."""
    for slot in range(AT_ONCE):
        is_heard = number % 50 == 0 and slot == 0
        model.open(slot, replace(SILENT, generate_audio=is_heard, seed=number))
    for second in range(1 + (number % 5 == 0)):
        frames = (FRAME,) if number % 50 == 0 else ()
        audio = TALK[second * UNIT : (second + 1) * UNIT]
        results = list(model.step([Unit(slot, audio, False, frames) for slot in range(4)]))
        assert all(isinstance(result, UnitOutput) for result in results)
        model.settle(range(AT_ONCE))
    for slot in range(AT_ONCE):
        model.close(slot)


def live_tensors() -> tuple[int, int]:
    """Return the number of live tensors and the bytes of their storages."""
    gc.collect()
    tensors = [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]
    storages = {found.untyped_storage().data_ptr(): found for found in tensors}
    return len(tensors), sum(found.untyped_storage().nbytes() for found in storages.values())


def test_hundreds_of_conversations_leave_the_memory_as_it_was(model: DuplexModel) -> None:
    process = psutil.Process()
    for number in (0, 1, 5, 50):  # every kind of conversation, and the largest kind twice
        converse(model, number=number)
    tensors, stated = live_tensors(), model.memory_bytes
    # The C library's allocator takes more memory until it has served every size of request once.
    for number in range(CONVERSATIONS // AT_ONCE // 4):
        converse(model, number=number)
    resident = process.memory_info().rss
    for number in range(CONVERSATIONS // AT_ONCE):
        converse(model, number=number)
    assert live_tensors() == tensors
    assert model.memory_bytes == stated
    assert all(model.is_clean(slot) for slot in range(AT_ONCE))
    # The allocator may hold a few more pages. A leak of one conversation's state (3 MiB) in each
    # conversation would be far above this limit.
    assert process.memory_info().rss - resident < 16 * MEBIBYTE
