"""A model that does what a test says, and holds the worker to the laws of driving one.

Every breach of those laws (who may call, in which order, with what) is kept in `breaches`, which
a test asserts to be empty at its end.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from PIL.Image import Image

from duplane.fabric.v1 import registry_pb2
from duplane.worker.model.chat_types import ChatOutput, ChatRequest, Finish
from duplane.worker.model.images import PreparedImage
from duplane.worker.model.types import (
    ConversationOptions,
    Opened,
    UnitFailure,
    UnitInput,
    UnitOutput,
)

PROMPT_TOKENS = 7
UNIT_TOKENS = 12
BASE_MEMORY_BYTES = 1_000_000

Answer = Callable[[UnitInput, int], UnitOutput | UnitFailure]


def answer_loud(unit: UnitInput, context_length: int) -> UnitOutput:
    """Listen to silence and to whom must be listened to; speak to everything else."""
    is_listen = unit.force_listen or not unit.audio.any()
    return UnitOutput(
        slot=unit.slot,
        is_listen=is_listen,
        text="" if is_listen else f"{unit.audio[0]:.3f}",
        audio=np.zeros(0 if is_listen else 240, np.float32),
        end_of_turn=False,
        context_length=context_length,
        token_ids=(1,) if is_listen else (2, 3),
        text_token_count=0 if is_listen else 2,
        audio_token_count=0 if is_listen else 5,
        stage_s={"audio": 0.001, "prefill": 0.002, "decode": 0.003},
    )


@dataclass(frozen=True)
class PreparedChat:
    """A chat that the scripted model found good: a text prompt of its length in characters."""

    request: ChatRequest
    prompt_rows: int
    image_rows: int = 0
    audio_rows: int = 0


def echo(slot: int, request: ChatRequest) -> Iterator[ChatOutput | UnitFailure]:
    """Answer with the words of the last message, one in each step, after a step of prefill."""
    last = request.messages[-1].parts[-1]
    words = last.split() if isinstance(last, str) else []
    words = words[: request.options.max_new_tokens]
    yield ChatOutput(slot, 0, is_prefilled=False, stage_s={"prefill": 0.001})
    yield ChatOutput(slot, PROMPT_TOKENS, stage_s={"prefill": 0.001})
    samples = np.full(240 if request.options.generate_audio else 0, 0.25, np.float32)
    for index, word in enumerate(words):
        length = PROMPT_TOKENS + index + 1
        yield ChatOutput(
            slot,
            length,
            text=f"{word} ",
            audio=samples,
            token_ids=(index,),
            finish=Finish.STOP if index + 1 == len(words) else None,
            stage_s={"decode": 0.002},
        )


class ScriptedModel:
    """Implements the worker's `Model` and, being its own device, its `Device`.

    `answer`, `on_open`, `on_close` and `is_dirty` may be replaced by a test. `hold()` makes the
    device thread wait inside its next step until `let_go()`.
    """

    def __init__(self, slot_count: int = 2, context_capacity: int = 8192) -> None:
        self.slot_count = slot_count
        self.context_capacity = context_capacity
        self.name = "scripted"
        self.parameter_count = 42
        self.memory_bytes = BASE_MEMORY_BYTES
        self.sees_frames = True
        self.answer: Answer = answer_loud
        self.on_open: Callable[[int, ConversationOptions], None] = lambda slot, options: None
        self.has_chat = True
        self.on_chat: Callable[[int, ChatRequest], Iterator[ChatOutput | UnitFailure]] = echo
        self.on_prepare: Callable[[ChatRequest], None] = lambda request: None
        self.chats: dict[int, ChatRequest] = {}
        self.chat_rounds: list[tuple[int, ...]] = []
        self.order: list[str] = []
        self._chatting: dict[int, Iterator[ChatOutput | UnitFailure]] = {}
        self.on_close: Callable[[int], None] = lambda slot: None
        self.is_dirty: Callable[[int], bool] = lambda slot: False
        self.breaches: list[str] = []
        self.rounds: list[tuple[int, ...]] = []
        self.options: dict[int, ConversationOptions] = {}
        self.prepared: list[ConversationOptions] = []
        self._lengths: dict[int, int] = {}
        self._unsettled: set[int] = set()
        self._thread: int | None = None
        self._is_warm = False
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._entered = asyncio.Event()
        self._gate = threading.Event()
        self._gate.set()

    # The device.

    def description(self) -> registry_pb2.Device:
        return registry_pb2.Device(name="scripted")

    def load(self) -> ScriptedModel:
        self._check_thread()
        return self

    def memory_used_bytes(self, model: object) -> int:
        self._is_warm = True  # it is asked for when the worker has tried the model out
        return self.memory_bytes

    # The test's side.

    def hold(self) -> None:
        """Let the next step wait."""
        self._entered.clear()
        self._gate.clear()

    async def held(self) -> None:
        """Wait until the device thread waits in a step."""
        async with asyncio.timeout(5):
            await self._entered.wait()

    def let_go(self) -> None:
        self._gate.set()

    # The model.

    def prepare_voice(self, options: ConversationOptions) -> None:
        held = (self._thread, self._loop_thread)
        self._check(threading.get_ident() not in held, "prepared on the device or loop thread")
        self.prepared.append(options)

    def open(self, slot: int, options: ConversationOptions) -> Opened:
        self._check_thread()
        self._check(slot not in self._lengths, f"slot {slot} opened twice")
        self.on_open(slot, options)
        self.options[slot] = options
        self._lengths[slot] = PROMPT_TOKENS
        return Opened(PROMPT_TOKENS, ("generate_audio", "tts_voice"))

    def prepare(self, unit: UnitInput) -> UnitInput | UnitFailure:
        """Leave frames as they are; an empty one is no picture."""
        self._check(self._thread != threading.get_ident(), "prepared on the device thread")
        if b"" in unit.frames:
            return UnitFailure(unit.slot, "IMAGE_INVALID", "a frame is empty", False)
        return unit

    def step(self, units: Sequence[UnitInput]) -> Iterator[UnitOutput | UnitFailure]:
        self._check_thread()
        slots = tuple(unit.slot for unit in units)
        self._check(len(set(slots)) == len(slots), f"two units of one slot in {slots}")
        self._check(all(slot in self._lengths for slot in slots), f"unopened slot in {slots}")
        self._check(self._unsettled.isdisjoint(slots), f"unsettled slot in {slots}")
        self.rounds.append(slots)
        self.order.append("units")
        self._unsettled.update(slots)
        self._wait()
        for unit in units:
            length = self._lengths[unit.slot] + UNIT_TOKENS
            result = self.answer(unit, length)
            self._lengths[unit.slot] = length
            yield result

    def settle(self, slots: Sequence[int]) -> list[UnitFailure]:
        self._check_thread()
        self._unsettled.difference_update(slots)
        return []

    def _wait(self) -> None:
        """Stay here while a test holds the device."""
        if not self._gate.is_set():
            self._loop.call_soon_threadsafe(self._entered.set)
            self._gate.wait(10)

    def prepare_picture(self, picture: Image, max_slices: int | None) -> PreparedImage:
        held = (self._thread, self._loop_thread)
        self._check(threading.get_ident() not in held, "cut on the device or loop thread")
        return PreparedImage((), None, picture.size)

    def prepare_chat(self, request: ChatRequest, check: Callable[[], None]) -> PreparedChat:
        held = self._is_warm and self._thread == threading.get_ident()
        self._check(not held, "a chat prepared on the device thread")
        for _ in request.messages:
            check()
            self.on_prepare(request)
        texts = [part for message in request.messages for part in message.parts]
        return PreparedChat(request, sum(len(text) for text in texts if isinstance(text, str)))

    def open_chat(self, slot: int, prepared: PreparedChat) -> None:
        self._check_thread()
        self._check(slot not in self._lengths, f"slot {slot} opened twice")
        self.chats[slot] = prepared.request
        self._chatting[slot] = self.on_chat(slot, prepared.request)
        self._lengths[slot] = PROMPT_TOKENS

    def chat_step(self, slots: Sequence[int]) -> Iterator[ChatOutput | UnitFailure]:
        self._check_thread()
        self._check(all(slot in self._chatting for slot in slots), f"no chat in {slots}")
        self.chat_rounds.append(tuple(slots))
        self.order.append("chat")
        self._wait()
        for slot in slots:
            yield next(self._chatting[slot])

    def close(self, slot: int) -> None:
        self._check_thread()
        self.on_close(slot)
        self._chatting.pop(slot, None)
        self._lengths.pop(slot, None)
        self._unsettled.discard(slot)

    def is_clean(self, slot: int) -> bool:
        return slot not in self._lengths and not self.is_dirty(slot)

    def _check_thread(self) -> None:
        self._thread = self._thread or threading.get_ident()
        self._check(self._thread == threading.get_ident(), "called from a second thread")

    def _check(self, is_lawful: bool, breach: str) -> None:
        if not is_lawful:
            self.breaches.append(breach)
