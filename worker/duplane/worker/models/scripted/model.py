"""A scripted model, with which the fabric can be tested and measured without torch or checkpoint.

The model answers a loud unit with speech and a silent unit with `listen`. It speaks one word of a
requested text in each unit. It answers a chat with the words of the last message. The same seed and
input give the same output. A unit whose first sample is one of the values of `Mark` makes the
worker fail in a chosen way.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, assert_never, cast

import numpy as np

from duplane.worker.models.chat import ChatOutput, ChatRequest, Finish
from duplane.worker.models.interface import (
    Continue,
    DeviceDescription,
    Item,
    Model,
    ModelConstants,
    Open,
    Part,
    Preparer,
    Rebuild,
    Result,
    RunUnit,
    StartChat,
    Unfinished,
)
from duplane.worker.models.scripted.speech import STATE, ScriptedSpeech, unfinished
from duplane.worker.models.types import (
    ConversationOptions,
    FloatArray,
    Opened,
    PastUnit,
    Rebuilt,
    StateChange,
    Unit,
    UnitFailure,
    UnitOutput,
)

if TYPE_CHECKING:  # a base install has no Pillow
    from PIL.Image import Image

Answer = Callable[[Unit, int], UnitOutput | UnitFailure]
"""Returns the answer to a unit, given the length of the context after the unit."""

PROMPT_TOKENS = 7
UNIT_TOKENS = 12
REBUILT_UNITS = 4
"""Maximum number of past units that one call of `rebuild` takes."""
INPUT_SAMPLE_RATE, OUTPUT_SAMPLE_RATE = 16_000, 24_000
SPEECH = (0.25 * np.sin(np.arange(OUTPUT_SAMPLE_RATE) * 0.1)).astype(np.float32)
"""The speech of one unit: a tone of one second."""
SLOW_UNIT_S = 5.0
_STAGES = ("audio", "prefill", "decode")  # of every unit
_NO_AUDIO = np.zeros(0, np.float32)
_WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight")


class Mark(Enum):
    """Values of a unit's first sample that make the worker fail, each in its own way."""

    SLOW_UNIT = 0.78125  # the unit takes SLOW_UNIT_S
    FAILED_UNIT = 0.8125  # the unit and its conversation fail
    HUNG_DEVICE = 0.84375  # the call into the model never returns
    LOST_DEVICE = 0.875  # the device can no longer be used
    KILLED_WORKER = 0.90625  # the process ends at once, as after SIGKILL


@dataclass(frozen=True)
class ScriptedChat:
    """A prepared chat request; each character of its text counts as one row of the prompt."""

    request: ChatRequest
    prompt_rows: int
    image_rows: int = 0
    audio_rows: int = 0
    uses_tts_voice: bool = False


@dataclass(frozen=True)
class ScriptedPicture:
    """A prepared picture, which has one piece."""

    size: tuple[int, int]
    piece_count: int = 1


def answer_loud(
    unit: Unit,
    context_length: int,
    text: str = "",
    speech: FloatArray = SPEECH,
    *,
    is_listen: bool | None = None,
) -> UnitOutput:
    """Listen if the unit is silent or has `force_listen`; otherwise speak.

    `is_listen` decides otherwise.
    """
    if is_listen is None:
        is_listen = unit.force_listen or not unit.audio.any()
    return UnitOutput(
        slot=unit.slot,
        is_listen=is_listen,
        text="" if is_listen else text,
        audio=_NO_AUDIO if is_listen else speech,
        end_of_turn=False,
        is_forced=unit.force_listen,
        context_length=context_length,
        token_ids=(1,) if is_listen else (2, 3),
        text_token_count=0 if is_listen else 2,
        audio_token_count=0 if is_listen else 5,
        state=STATE,
        change=StateChange(() if is_listen else (1, 2, 3, 4, 5), (1,) if is_listen else (2,), 2),
    )


def echo(
    slot: int, request: ChatRequest, speech: FloatArray = SPEECH
) -> Iterator[ChatOutput | UnitFailure]:
    """Answer with the words of the last message: after two prefill steps, one word per step."""
    last = request.messages[-1].parts[-1]
    words = last.split() if isinstance(last, str) else []
    words = words[: request.options.max_new_tokens]
    yield ChatOutput(slot, 0, is_prefilled=False, stage_s={"prefill": 0.001})
    finish = None if words else Finish.STOP
    yield ChatOutput(slot, PROMPT_TOKENS, finish=finish, stage_s={"prefill": 0.001})
    for index, word in enumerate(words):
        yield ChatOutput(
            slot,
            PROMPT_TOKENS + index + 1,
            text=f"{word} ",
            audio=speech if request.options.generate_audio else _NO_AUDIO,
            token_ids=(index,),
            finish=Finish.STOP if index + 1 == len(words) else None,
            stage_s={"decode": 0.002},
        )


@dataclass(frozen=True)
class ScriptedConversation:
    """A prepared conversation."""

    options: ConversationOptions
    rows: int = PROMPT_TOKENS


class ScriptedModel:
    """Implements `Model` and `Preparer`."""

    def __init__(
        self,
        slot_count: int,
        context_capacity: int = 8192,
        *,
        seed: int = 0,
        unit_s: float = 0.0,
    ) -> None:
        """Make a model whose answers depend on `seed`.

        A batch of units takes `unit_s` seconds, and so does a step of the chats. The attribute
        `stage_s` has the seconds of each stage, also of `settle` and `rebuild`; tests change it.
        """
        self.constants = ModelConstants(
            slot_count=slot_count,
            context_capacity=context_capacity,
            name="scripted",
            digest=f"scripted-{seed}",
            parameter_count=0,
            memory_bytes=0,
            unit_s=1.0,
            input_hertz=INPUT_SAMPLE_RATE,
            output_hertz=OUTPUT_SAMPLE_RATE,
            accepts_pictures=True,
            has_chat=True,
            accepts_speech_requests=True,
            accepts_unfed_units=True,
        )
        self.is_lost = False
        self.answer: Answer = self._answer
        self._seed = seed
        self.stage_s = dict.fromkeys(_STAGES, 0.0) | {"decode": unit_s}
        self._settle_s: dict[int, float] = {}  # of the last unit of each slot
        self._lengths: dict[int, int] = {}
        self._speech: dict[int, ScriptedSpeech] = {}
        self._chats: dict[int, Iterator[ChatOutput | UnitFailure]] = {}

    # The preparer.

    def conversation(self, options: ConversationOptions) -> ScriptedConversation:
        """Return the conversation. Options have no effect."""
        return ScriptedConversation(options)

    def unit(self, unit: Unit) -> Unit | UnitFailure:
        """Return the unit with its rows, or a failure if one of its frames is empty.

        Each frame has as many rows as the sound.
        """
        if b"" in unit.frames:
            field = f"frames[{unit.frames.index(b'')}]"
            return UnitFailure(unit.slot, "IMAGE_INVALID", "the frame is empty", False, field)
        return replace(unit, rows=UNIT_TOKENS * (1 + len(unit.frames)))

    def unit_steps(self, unit: Unit) -> Generator[None, None, Unit | UnitFailure]:
        """Do what `unit` does in one step."""
        yield from ()
        return self.unit(unit)

    def picture(self, picture: Image, max_slices: int | None) -> ScriptedPicture:
        """Return a prepared picture that has only the picture's size."""
        del max_slices
        return ScriptedPicture(picture.size)

    def chat(self, request: ChatRequest, check: Callable[[], None]) -> ScriptedChat:
        """Count the rows of a request."""
        check()
        texts = [part for message in request.messages for part in message.parts]
        return ScriptedChat(request, sum(len(text) for text in texts if isinstance(text, str)))

    # The model.

    def advance(self, items: Sequence[Item]) -> Iterator[Result]:
        """Answer units and open conversations at once. A chat has one output in each call."""
        units: list[Unit] = []
        chats: list[int] = []
        for item in items:
            match item:
                case RunUnit(unit):
                    units.append(unit)
                case Continue():
                    chats.append(item.slot)
                case Open():
                    yield self.open(item.slot, cast("ScriptedConversation", item.conversation))
                case StartChat():
                    self.open_chat(item.slot, cast("ScriptedChat", item.chat))
                    yield Unfinished(item.slot, Part.DECODE)
                case Rebuild():
                    yield self.rebuild(item.slot, item.units)
                case _:
                    assert_never(item)
        if units:
            yield from self.step(units)
            yield from self.settle([unit.slot for unit in units])
        if chats:
            yield from self.chat_step(chats)

    def open(self, slot: int, conversation: ScriptedConversation) -> Opened:
        """Open a conversation."""
        self._lengths[slot] = conversation.rows
        self._speech[slot] = ScriptedSpeech()
        return Opened(slot, conversation.rows, ("generate_audio", "tts_voice"))

    def step(self, units: Sequence[Unit]) -> Iterator[UnitOutput | UnitFailure]:
        """Answer a batch of units, at most one for each slot."""
        laps_s = self._laps()
        for unit in units:
            result = self._run(unit)
            if isinstance(result, UnitOutput):
                settle_s = self._settle_s.get(unit.slot, 0.0)
                stage_s = {**laps_s, "settle": settle_s, **result.stage_s}
                result = replace(result, stage_s=stage_s)
            yield result

    def _laps(self) -> dict[str, float]:
        """Wait as long as the stages of a batch take; return the seconds of each stage."""
        laps_s: dict[str, float] = {}
        begin_s = time.monotonic()
        for stage, seconds in self.stage_s.items():
            if stage in ("settle", "rebuild") or (stage not in _STAGES and not seconds):
                continue
            if seconds:
                time.sleep(seconds)
            end_s = time.monotonic()
            laps_s[stage], begin_s = end_s - begin_s, end_s
        return laps_s

    def _run(self, unit: Unit) -> UnitOutput | UnitFailure:
        mark = _MARKS.get(float(unit.audio[0])) if unit.audio.size else None
        if mark is Mark.SLOW_UNIT:
            time.sleep(SLOW_UNIT_S)
        elif mark:
            return self._fail(unit, mark)
        length = self._lengths[unit.slot] + UNIT_TOKENS
        result = self.answer(unit, length)
        if isinstance(result, UnitOutput):
            self._lengths[unit.slot] = length
            speak = partial(answer_loud, unit, length, is_listen=False)
            result = self._speech[unit.slot].apply(unit, result, speak)
        return result

    def _answer(self, unit: Unit, context_length: int) -> UnitOutput | UnitFailure:
        """Answer one unit, with a word that depends on the seed and on the context's length."""
        if context_length > self.constants.context_capacity:
            return UnitFailure(unit.slot, "CONTEXT_FULL", "the context is full", False)
        word = random.Random(f"{self._seed}/{context_length}").choice(_WORDS)
        return answer_loud(unit, context_length, f"{word} ")

    def _fail(self, unit: Unit, mark: Mark) -> UnitFailure:
        if mark is Mark.HUNG_DEVICE:
            threading.Event().wait()
        if mark is Mark.KILLED_WORKER:
            os.kill(os.getpid(), signal.SIGKILL)
        self.is_lost = mark is Mark.LOST_DEVICE
        return UnitFailure(unit.slot, "INTERNAL", "the unit is marked to fail", True)

    def settle(self, slots: Sequence[int]) -> Sequence[UnitFailure]:
        """Wait as long as `stage_s` has for this stage. No state of the model changes."""
        begin_s = time.monotonic()
        if seconds := self.stage_s.get("settle"):
            time.sleep(seconds)
        self._settle_s.update(dict.fromkeys(slots, time.monotonic() - begin_s))
        return ()

    def rebuild(self, slot: int, units: Sequence[PastUnit]) -> Rebuilt | UnitFailure:
        """Take at most `REBUILT_UNITS` past units, and wait as long as the stage `rebuild` takes.

        Later answers are the same as if this model had answered these units itself.
        """
        if seconds := self.stage_s.get("rebuild"):
            time.sleep(seconds)
        taken = units[:REBUILT_UNITS]
        for past in taken:
            length = self._lengths[slot] + UNIT_TOKENS
            if not past.token_ids:
                return _refusal(slot, "REBUILD_REFUSED", past, "has no ids", "token_ids")
            if length != past.context_length:
                message = f"ends at {length} tokens, not {past.context_length}"
                return _refusal(slot, "REBUILD_DIFFERS", past, message)
            self._lengths[slot] = length
            self._speech[slot].waiting = unfinished(past.state)
        is_complete = len(taken) == len(units)
        return Rebuilt(slot, len(taken), self._lengths[slot], is_complete)

    def open_chat(self, slot: int, prepared: ScriptedChat) -> None:
        """Open a chat."""
        self._lengths[slot] = PROMPT_TOKENS
        self._chats[slot] = self.answer_chat(slot, prepared.request)

    def answer_chat(self, slot: int, request: ChatRequest) -> Iterator[ChatOutput | UnitFailure]:
        """Yield the steps of the answer to a chat."""
        return echo(slot, request)

    def chat_step(self, slots: Sequence[int]) -> Iterator[Result]:
        """Run one step of several chats, which takes as long as the decode stage of a unit."""
        if seconds := self.stage_s["decode"]:
            time.sleep(seconds)
        for slot in slots:
            output = next(self._chats[slot])
            yield output
            if isinstance(output, ChatOutput) and output.finish is None:
                yield Unfinished(slot, Part.DECODE)

    def close(self, slot: int) -> None:
        """Forget the conversation or chat of a slot."""
        self._chats.pop(slot, None)
        self._lengths.pop(slot, None)
        self._speech.pop(slot, None)
        self._settle_s.pop(slot, None)

    def is_clean(self, slot: int) -> bool:
        """True if the slot has no conversation and no chat."""
        return slot not in self._lengths


def _refusal(slot: int, reason: str, past: PastUnit, message: str, field: str = "") -> UnitFailure:
    message = f"past unit {past.unit.sequence} {message}"
    return UnitFailure(slot, reason, message, is_fatal=True, field=field)


_MARKS = {mark.value: mark for mark in Mark}


class ScriptedDevice:
    """Implements `Device` for a scripted model."""

    def __init__(self, model: ScriptedModel) -> None:
        self._model = model

    def description(self) -> DeviceDescription:
        """Describe the device for operators."""
        return DeviceDescription("scripted")

    def load(self) -> tuple[Preparer, Model]:
        """Return the model."""
        return self._model, self._model

    def load_preparer(self) -> Preparer:
        """Return the model."""
        return self._model

    def lane(self, name: str) -> AbstractContextManager[None]:
        """Return a context without effect: all calls of the model are of one lane."""
        del name
        return nullcontext()

    def memory_used_bytes(self) -> int:
        """Return 0: the model allocates nothing."""
        return 0

    def check(self) -> None:
        """Raise RuntimeError after a unit marked `LOST_DEVICE`."""
        if self._model.is_lost:
            raise RuntimeError("a unit was marked to lose the device")
