"""The model on a device that is not the host: nothing is mixed, and the answers are the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from elsewhere import elsewhere

from duplane.tools.replay.audio import read_audio, read_clip
from duplane.worker.model.chat_types import (
    ChatAudio,
    ChatImage,
    ChatMessage,
    ChatOptions,
    ChatOutput,
    ChatPart,
    ChatRequest,
    ChatRole,
)
from duplane.worker.model.half_duplex import HalfDuplex, TextWindow
from duplane.worker.model.model import DuplexModel
from duplane.worker.model.types import (
    ConversationOptions,
    DecodeMode,
    UnitInput,
    UnitOutput,
    WindowMode,
)

PUBLIC = Path(__file__).parent / "public"
UNIT = 16_000
TALK = read_audio(PUBLIC / "audio" / "talk.wav", 20 * UNIT)
SILENT = np.zeros(0, np.float32)
REF = read_clip(PUBLIC / "audio" / "ref1.wav")
USER = ChatAudio(read_clip(PUBLIC / "audio" / "user.wav"))
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
    return (PUBLIC / "images" / name).read_bytes()


def unit(slot: int, number: int) -> UnitInput:
    """Audio, pictures in some seconds, one of pictures alone, one in which it has to listen."""
    audio = TALK[(3 + number) * UNIT :][:UNIT] if number != 5 or slot else SILENT
    frames = {1: (picture("sq.png"),), 3: (picture("big.png"), picture("wide.png"))}
    shown = frames.get(number, ()) if slot != 1 else ()
    if not len(audio):
        shown = (picture("small.png"),)
    return UnitInput(slot, audio, number == 4 and slot == 1, shown, 4)


def converse(model: DuplexModel) -> list[Any]:
    """Four conversations, of every kind of window, of which some do not take part now and then."""
    said: list[Any] = []
    options = (GREEDY, SAMPLED, BASIC, CONTEXT)
    for slot in range(SLOTS):
        said.append(model.open(slot, options[slot]))
    for number in range(8):
        slots = [slot for slot in range(SLOTS) if (number + slot) % 4 or number < 2]
        said += run(model, [unit(slot, number) for slot in slots])
    return said + leave(model)


def run(model: DuplexModel, units: Sequence[UnitInput]) -> list[Any]:
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
    """Four chats beside each other: text, a picture, sound, a long prompt; two are spoken."""
    for slot, request in enumerate(CHATS):
        model.open_chat(slot, model.prepare_chat(request))
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
    """Half duplex, long enough for its window to move, and spoken."""
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


def load(checkpoint: Path, device: str, dtype: str = "float32") -> DuplexModel:
    return DuplexModel.load(
        checkpoint, slot_count=SLOTS, context_capacity=1024, device=device, dtype=dtype
    )


@pytest.mark.parametrize("play", PLAYS.values(), ids=PLAYS)
def test_it(speaking_checkpoint: Path, play: Callable[[DuplexModel], list[Any]]) -> None:
    want = play(load(speaking_checkpoint, "cpu"))
    with elsewhere() as border:
        model = load(speaking_checkpoint, "cuda:0")
        border.crossings.clear()
        got = play(model)
        from collections import Counter

        for c, n in sorted(
            Counter(
                (c.way.value, c.operation, c.where, c.callers) for c in border.crossings
            ).items()
        ):
            print(n, *c)
    assert got == want
