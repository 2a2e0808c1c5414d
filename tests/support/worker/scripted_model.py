"""The scripted model of the worker, with controls for tests and with checks of its caller.

The model checks the thread, the order and the arguments of its calls. It adds each violation to
`violations`; `running_worker` asserts at the end that `violations` is empty.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
from PIL.Image import Image
from support.time_limits import WITHIN_S

from duplane.worker.models.chat import ChatOutput, ChatRequest
from duplane.worker.models.interface import DeviceDescription, Model, Preparer, Result
from duplane.worker.models.scripted import model as scripted_model
from duplane.worker.models.scripted.model import (
    PROMPT_TOKENS,
    UNIT_TOKENS,
    ScriptedChat,
    ScriptedConversation,
    ScriptedPicture,
)
from duplane.worker.models.types import (
    ConversationOptions,
    Opened,
    Unit,
    UnitFailure,
    UnitOutput,
)

__all__ = [
    "BASE_MEMORY_BYTES",
    "PROMPT_TOKENS",
    "UNIT_TOKENS",
    "ScriptedChat",
    "ScriptedConversation",
    "ScriptedModel",
    "ScriptedPicture",
    "answer_loud",
    "echo",
]

BASE_MEMORY_BYTES = 1_000_000


def answer_loud(unit: Unit, context_length: int) -> UnitOutput:
    """Listen to silence. Otherwise speak for 10 ms, with the unit's first sample as the text."""
    text = f"{unit.audio[0]:.3f}" if unit.audio.size else ""
    return scripted_model.answer_loud(unit, context_length, text, np.zeros(240, np.float32))


echo = partial(scripted_model.echo, speech=np.full(240, 0.25, np.float32))


class ScriptedModel(scripted_model.ScriptedModel):
    """Implements the worker's `Model` and `Device`.

    A test may replace `answer`, `is_dirty` and the `on_*` functions. `hold()` makes the device
    thread wait inside its next step until the test calls `let_go()`.
    """

    def __init__(self, slot_count: int = 2, context_capacity: int = 8192) -> None:
        super().__init__(slot_count, context_capacity)
        self.constants = replace(self.constants, parameter_count=42)
        self.memory_bytes = BASE_MEMORY_BYTES
        self.device_error: Exception | None = None
        self.uses_tts_voice = False
        self.answer = answer_loud
        self.on_open: Callable[[int, ConversationOptions], None] = lambda slot, options: None
        self.on_options: Callable[[ConversationOptions], None] = lambda options: None
        self.on_chat: Callable[[int, ChatRequest], Iterator[ChatOutput | UnitFailure]] = echo
        self.on_prepare: Callable[[ChatRequest], None] = lambda request: None
        self.chats: dict[int, ChatRequest] = {}
        self.chat_rounds: list[tuple[int, ...]] = []
        self.order: list[str] = []
        self.on_close: Callable[[int], None] = lambda slot: None
        self.is_dirty: Callable[[int], bool] = lambda slot: False
        self.violations: list[str] = []
        self.rounds: list[tuple[int, ...]] = []
        self.options: dict[int, ConversationOptions] = {}
        self.prepared: list[ConversationOptions] = []
        self._unsettled: set[int] = set()
        self._thread: int | None = None
        self._is_warm = False
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._entered = asyncio.Event()
        self._gate = threading.Event()
        self._gate.set()

    # Implementation of `Device`.

    def description(self) -> DeviceDescription:
        return DeviceDescription("scripted")

    def load(self) -> tuple[Preparer, Model]:
        self._check_thread()
        return self, self

    def load_preparer(self) -> Preparer:
        return self

    def check(self) -> None:
        if self.device_error is not None:
            raise self.device_error

    def lane(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def memory_used_bytes(self) -> int:
        self._is_warm = True  # the worker calls this after its warm-up
        return self.memory_bytes

    # Controls for tests.

    def hold(self) -> None:
        """Make the device thread wait in its next step."""
        self._entered.clear()
        self._gate.clear()

    async def held(self) -> None:
        """Wait until the device thread waits in a step."""
        async with asyncio.timeout(WITHIN_S):
            await self._entered.wait()

    def let_go(self) -> None:
        self._gate.set()

    # Implementation of `Model`.

    def conversation(self, options: ConversationOptions) -> ScriptedConversation:
        if self._is_warm:
            held = (self._thread, self._loop_thread)
            self._check(threading.get_ident() not in held, "prepared on the device or loop thread")
            self.prepared.append(options)
        self.on_options(options)
        return super().conversation(options)

    def open(self, slot: int, conversation: ScriptedConversation) -> Opened:
        self._check_thread()
        self._check(slot not in self._lengths, f"slot {slot} opened twice")
        self.on_open(slot, conversation.options)
        self.options[slot] = conversation.options
        return super().open(slot, conversation)

    def unit(self, unit: Unit) -> Unit | UnitFailure:
        is_held = self._is_warm and self._thread == threading.get_ident()
        self._check(not is_held, "prepared on the device thread")
        return super().unit(unit)

    def step(self, units: Sequence[Unit]) -> Iterator[UnitOutput | UnitFailure]:
        self._check_thread()
        slots = tuple(unit.slot for unit in units)
        self._check(len(set(slots)) == len(slots), f"two units of one slot in {slots}")
        self._check(all(slot in self._lengths for slot in slots), f"unopened slot in {slots}")
        self._check(self._unsettled.isdisjoint(slots), f"unsettled slot in {slots}")
        self.rounds.append(slots)
        self.order.append("units")
        self._unsettled.update(slots)
        self.wait()
        yield from super().step(units)

    def settle(self, slots: Sequence[int]) -> Sequence[UnitFailure]:
        self._check_thread()
        self._unsettled.difference_update(slots)
        return super().settle(slots)

    def wait(self) -> None:
        """Block while a test holds the device. The time limit only ends a test that hangs."""
        if not self._gate.is_set():
            self._loop.call_soon_threadsafe(self._entered.set)
            self._gate.wait(2 * WITHIN_S)

    def picture(self, picture: Image, max_slices: int | None) -> ScriptedPicture:
        held = (self._thread, self._loop_thread)
        self._check(threading.get_ident() not in held, "cut on the device or loop thread")
        return super().picture(picture, max_slices)

    def chat(self, request: ChatRequest, check: Callable[[], None]) -> ScriptedChat:
        held = self._is_warm and self._thread == threading.get_ident()
        self._check(not held, "a chat prepared on the device thread")
        for _ in request.messages:
            check()
            self.on_prepare(request)
        prepared = super().chat(request, check)
        return replace(prepared, uses_tts_voice=self.uses_tts_voice)

    def open_chat(self, slot: int, prepared: ScriptedChat) -> None:
        self._check_thread()
        self._check(slot not in self._lengths, f"slot {slot} opened twice")
        self.chats[slot] = prepared.request
        super().open_chat(slot, prepared)

    def answer_chat(self, slot: int, request: ChatRequest) -> Iterator[ChatOutput | UnitFailure]:
        return self.on_chat(slot, request)

    def chat_step(self, slots: Sequence[int]) -> Iterator[Result]:
        self._check_thread()
        self._check(all(slot in self._chats for slot in slots), f"no chat in {slots}")
        self.chat_rounds.append(tuple(slots))
        self.order.append("chat")
        self.wait()
        yield from super().chat_step(slots)

    def close(self, slot: int) -> None:
        self._check_thread()
        self.on_close(slot)
        super().close(slot)
        self._unsettled.discard(slot)

    def is_clean(self, slot: int) -> bool:
        return super().is_clean(slot) and not self.is_dirty(slot)

    def _check_thread(self) -> None:
        self._thread = self._thread or threading.get_ident()
        self._check(self._thread == threading.get_ident(), "called from a second thread")

    def _check(self, is_allowed: bool, violation: str) -> None:
        if not is_allowed:
            self.violations.append(violation)
