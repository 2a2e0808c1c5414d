"""The model on a fake device: no operation mixes devices, and the answers equal the CPU's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.model.fake_cuda import DEVICE, Border, DeviceError, Way, elsewhere
from support.model.voice_files import write_voice_networks
from support.paths import GOLDEN
from support.test_checkpoint.build import build_test_checkpoint
from torch import Tensor
from torch.nn import functional

from duplane.tools.bench.launches import attend_to_pages
from duplane.tools.golden_replay.audio import read_audio, read_clip
from duplane.tools.golden_replay.half_duplex import HalfDuplex, TextWindow
from duplane.worker.models.chat import (
    ChatAudio,
    ChatImage,
    ChatMessage,
    ChatOptions,
    ChatOutput,
    ChatPart,
    ChatRequest,
    ChatRole,
)
from duplane.worker.models.families import open_device
from duplane.worker.models.minicpm_o.model import DuplexModel
from duplane.worker.models.types import (
    ConversationOptions,
    DecodeMode,
    Unit,
    UnitOutput,
    WindowMode,
)
from duplane.worker.settings import WorkerSettings

UNIT = 16_000
TALK = read_audio(GOLDEN / "audio" / "talk.wav", 20 * UNIT)
SILENT = np.zeros(0, np.float32)
REF = read_clip(GOLDEN / "audio" / "ref1.wav")
USER = ChatAudio(read_clip(GOLDEN / "audio" / "user.wav"))
SLOTS = 4
GREEDY = ConversationOptions(decode_mode=DecodeMode.GREEDY, force_listen_count=0, seed=0)
SAMPLED = ConversationOptions(
    force_listen_count=1, temperature=0.9, text_repetition_window_size=4, seed=1, llm_voice=REF
)
BASIC = replace(
    GREEDY,
    sliding_window_mode=WindowMode.BASIC,
    basic_window_high_tokens=150,
    basic_window_low_tokens=100,
)
CONTEXT = replace(
    SAMPLED,
    sliding_window_mode=WindowMode.CONTEXT,
    context_max_units=2,
    context_previous_max_tokens=30,
)


def picture(name: str) -> bytes:
    return (GOLDEN / "images" / name).read_bytes()


def unit(slot: int, number: int) -> Unit:
    """Return a unit of audio. Some units have pictures, one has only pictures, one must listen."""
    audio = TALK[(3 + number) * UNIT :][:UNIT] if number != 5 or slot else SILENT
    frames = {1: (picture("sq.png"),), 3: (picture("big.png"), picture("wide.png"))}
    shown = frames.get(number, ()) if slot != 1 else ()
    if not len(audio):
        shown = (picture("small.png"),)
    return Unit(slot, audio, number == 4 and slot == 1, shown, 2)


def converse(model: DuplexModel, seconds: int = 7) -> list[Any]:
    """Run four conversations with all kinds of context window.

    In some seconds, a conversation has no unit.
    """
    said: list[Any] = []
    options = (GREEDY, SAMPLED, BASIC, CONTEXT)
    for slot in range(SLOTS):
        said.append(model.open(slot, options[slot]))
    for number in range(seconds):
        slots = [slot for slot in range(SLOTS) if (number + slot) % 4 or number < 2]
        said += run(model, [unit(slot, number) for slot in slots])
    return said + leave(model)


def run(model: DuplexModel, units: Sequence[Unit]) -> list[Any]:
    said: list[Any] = []
    for output in model.step(units):
        assert isinstance(output, UnitOutput), output
        assert np.isfinite(output.audio).all()
        counts = output.audio_token_count, len(output.audio), output.context_length
        said.append((output.slot, output.token_ids, *counts))
    failures = model.settle([unit.slot for unit in units])
    assert failures == []
    return said


def leave(model: DuplexModel) -> list[bool]:
    for slot in range(SLOTS):
        model.close(slot)
    clean = [model.is_clean(slot) for slot in range(SLOTS)]
    assert all(clean)
    return clean


def ask(*parts: ChatPart, **options: Any) -> ChatRequest:
    message = ChatMessage(ChatRole.USER, parts)
    return ChatRequest((message,), replace(ChatOptions(seed=5), max_new_tokens=20, **options))


CHATS = (
    ask("Sing a song for me.", decode_mode=DecodeMode.GREEDY, generate_audio=True),
    ask(ChatImage(picture("wide.png")), "What is it?", temperature=1.0, top_k=7),
    ask(USER, "Go on.", temperature=1.1, tts_temperature=1.0, generate_audio=True),
    ask("word " * 80, top_k=0, top_p=0.95, temperature=1.3),
)


def chat(model: DuplexModel) -> list[Any]:
    """Run four chats together: text, a picture, sound, a long prompt; two of them speak."""
    for slot, request in enumerate(CHATS):
        model.open_chat(slot, model.preparer.chat(request))
    return answer(model, range(SLOTS)) + leave(model)


def answer(model: DuplexModel, slots: Sequence[int]) -> list[Any]:
    said: list[Any] = []
    going = set(slots)
    while going:
        for output in model.chat_step(sorted(going)):
            assert isinstance(output, ChatOutput), output
            assert np.isfinite(output.audio).all()
            said.append((output.slot, output.token_ids, len(output.audio), output.finish))
            if output.finish is not None:
                going.remove(output.slot)
    return said


def take_turns(model: DuplexModel) -> list[Any]:
    """Run a half-duplex conversation with speech until its window has dropped exchanges."""
    options = ChatOptions(
        decode_mode=DecodeMode.GREEDY, max_new_tokens=8, seed=0, generate_audio=True
    )
    window = TextWindow(high_tokens=120, low_tokens=70)
    talk = HalfDuplex(model.chats, model.parts, 1, options, window=window)
    talk.instruct(["You never forget."])
    said: list[Any] = []
    for parts in ([USER], ["What is it?"], [USER], ["Go on."]):
        talk.hear(parts)
        said += [answer(model, [1]), model.context_length(1)]
    return said + leave(model)


PLAYS = {"duplex": converse, "chats": chat, "half duplex": take_turns}


def load(
    checkpoint: Path, device: str = DEVICE, dtype: str = "float32", *, cuda_graphs: bool = False
) -> DuplexModel:
    return DuplexModel.load(
        checkpoint,
        slot_count=SLOTS,
        context_capacity=768,
        device=device,
        dtype=dtype,
        cuda_graphs=cuda_graphs,
    )


@pytest.fixture(scope="module")
def pair(speaking_checkpoint: Path) -> tuple[DuplexModel, DuplexModel]:
    """Return the same model on the CPU and on the fake device."""
    here = load(speaking_checkpoint, "cpu")
    with elsewhere():
        return here, load(speaking_checkpoint, cuda_graphs=True)


UPLOADS = {"transfer.py upload", "transfer.py refill"}
DOWNLOADS = {"transfer.py download", "transfer.py __init__", "transfer.py result"}
TRANSFERS = UPLOADS | DOWNLOADS


def check_crossings(border: Border) -> None:
    """Check that only `transfer`, opening and closing move data between host and device."""
    strays = {
        f"{crossing.way.value} {crossing.operation}: {crossing.where} < {crossing.callers}"
        for crossing in border.crossings
        if crossing.where not in TRANSFERS
        and not {"is_clean", "prime"} & set(f"{crossing.where} {crossing.callers}".split())
    }
    assert strays == set()
    ways = {(crossing.where, crossing.way) for crossing in border.crossings}
    assert {("transfer.py upload", Way.UP), ("transfer.py download", Way.DOWN)} <= ways
    assert {way for where, way in ways if where in UPLOADS} == {Way.UP}
    assert not {way for where, way in ways if where in DOWNLOADS} & {Way.UP}


@pytest.mark.parametrize("play", PLAYS.values(), ids=PLAYS)
def test_all_that_is_said_on_a_device_is_what_is_said_here(
    pair: tuple[DuplexModel, DuplexModel], play: Callable[[DuplexModel], list[Any]]
) -> None:
    here, there = pair
    leave(here)
    with elsewhere() as border:
        leave(there)
        got = play(there)
    check_crossings(border)
    assert got == play(here)


@pytest.mark.parametrize("slots", [(0,), (0, 1, 3)], ids=str)
def test_the_host_waits_for_the_device_only_to_read_results(
    pair: tuple[DuplexModel, DuplexModel], slots: tuple[int, ...]
) -> None:
    _, there = pair
    with elsewhere() as border:
        leave(there)
        for slot in slots:
            there.open(slot, GREEDY)
        for number in range(6):
            units = [Unit(slot, TALK[number * UNIT :][:UNIT], number == 1) for slot in slots]
            border.crossings.clear()
            outputs = list(there.step(units))
            assert there.settle(slots) == []
            waits = [crossing for crossing in border.crossings if crossing.way is Way.DOWN]
            assert {wait.where for wait in waits} <= DOWNLOADS
            if number == 1:  # a unit that must listen needs no result from the device
                assert waits == []
            elif all(isinstance(one, UnitOutput) and one.is_listen for one in outputs):
                assert len(waits) == 1
            else:
                assert len(waits) > 1
        leave(there)


def take_paths_of_a_device(model: DuplexModel) -> None:
    """Let a model on the CPU encode and attend as on a device: other paths round in another way."""
    model.parts.audio.has_buckets = True
    for decoder in (model.llm, model.parts.talker):
        assert decoder is not None
        decoder.cache.kernel = attend_to_pages
    model.capture(is_replayed=False)


def test_half_precision_mixes_nothing_and_stays_finite(speaking_checkpoint: Path) -> None:
    here = load(speaking_checkpoint, "cpu", "bfloat16")
    take_paths_of_a_device(here)
    with elsewhere():
        there = load(speaking_checkpoint, dtype="bfloat16")
        there.capture(is_replayed=False)
        got = converse(there, 3)
    assert got == converse(here, 3)


def test_a_voice_that_is_brought_is_heard_on_a_device(tmp_path: Path) -> None:
    build_test_checkpoint(tmp_path)
    write_voice_networks(tmp_path / "assets" / "token2wav")
    options = replace(GREEDY, tts_voice=REF[: 2 * UNIT])
    said: list[list[Any]] = []
    for device in (DEVICE, "cpu"):
        with elsewhere():
            model = load(tmp_path, device)
            model.preparer.conversation(options)
            model.open(0, options)
            units = [Unit(0, TALK[number * UNIT :][:UNIT]) for number in range(5)]
            said.append([run(model, [one]) for one in units] + leave(model))
    assert said[0] == said[1]
    assert any(counts[3] for (counts,) in said[0][:5]), "nothing was spoken"


def test_the_worker_says_what_its_device_is(speaking_checkpoint: Path) -> None:
    settings = WorkerSettings(
        checkpoint=speaking_checkpoint,
        schedulers=("127.0.0.1:1",),
        device=DEVICE,
        slot_count=1,
        context_token_limit=256,
        turn_row_limit=128,
        threads=1,
    )
    with elsewhere(warms_up=True):
        device = open_device(settings)
        _, model = device.load()
        assert model.constants.parameter_count
        assert device.memory_used_bytes() == 0, "as the played allocator says"
        assert device.description().name == DEVICE
        assert device.description().description.endswith(", float32"), "the model is small"


REFUSED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a sum": lambda here, there: there + here,
    "a sum in place": lambda here, there: there.add_(here),
    "a product": lambda here, there: there @ here,
    "a choice": lambda here, there: torch.where(there > 0, there, here),
    "a row": lambda here, there: torch.cat([there, here]),
    "an embedding": lambda here, there: functional.embedding(torch.tensor([1]), there),
    "an index here": lambda here, there: here[torch.tensor([1], device=DEVICE)],
    "values there": lambda here, there: there.__setitem__([0, 1], here[:2]),
    "an array": lambda here, there: np.asarray(there),
    "draws": lambda here, there: torch.randn(3, device=DEVICE, generator=torch.Generator()),
    "a product of numbers": lambda here, there: there.long() @ there.long(),
    "two dtypes": lambda here, there: there @ there.bfloat16(),
}


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
@torch.inference_mode()
def test_the_played_device_refuses_what_cuda_would(call: Callable[[Tensor, Tensor], Any]) -> None:
    with elsewhere():
        here, there = torch.ones(4, 4), torch.ones(4, 4, device=DEVICE)
        with pytest.raises(RuntimeError):
            call(here, there)


@torch.inference_mode()
def test_the_played_device_takes_what_cuda_does_and_tells_of_it() -> None:
    with elsewhere() as border:
        there = torch.zeros(4, device=DEVICE)
        there[1:3] = torch.ones(2)
        there[torch.tensor([3])] = 2
        there += torch.tensor(1.0)
        assert there.device == torch.device(DEVICE)
        assert there.to(DEVICE) is there
        assert there.cpu().numpy().tolist() == there.tolist() == [1, 2, 2, 3]
        assert float(there.sum()) == 8
        drawn = torch.rand(1, device=DEVICE, generator=torch.Generator(DEVICE))
        assert drawn.device == there.device
    ways = [(crossing.way, crossing.operation) for crossing in border.crossings]
    assert ways[:2] == [(Way.UP, "aten::copy_"), (Way.UP, "aten::index_put_")]
    assert [way for way, _ in ways].count(Way.DOWN) == 3
    with pytest.raises(DeviceError, match="outside"):
        there.add_(1)
