"""What the device does, one call after the other: load, warm up, open, rounds of units, close.

Plain synchronous code for the one thread that owns the device; knows nothing of threads, queues or
sockets. Whatever a call into the model raises is turned into an event or a verdict here.
"""

from __future__ import annotations

import base64
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from PIL.Image import Image

from duplane.fabric.audio import INPUT_RATE_HERTZ, Samples
from duplane.fabric.v1 import registry_pb2
from duplane.worker.inbox import Refusal, Unit
from duplane.worker.model.chat_prompt import go_on
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
from duplane.worker.model.images import PreparedImage
from duplane.worker.model.types import (
    ConversationOptions,
    DecodeMode,
    Opened,
    OptionError,
    UnitFailure,
    UnitInput,
    UnitOutput,
)

_log = logging.getLogger(__name__)

_WARM_UP_UNITS = 3
_WARM_UP_CHAT_STEPS = 4  # the prompt, words, speech, and what comes after it
_WARM_UP_FRAME = base64.b64decode(  # one grey pixel; the model scales it to what it looks at
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNoAAAAggCBd81ytgAAAABJRU5ErkJggg=="
)


class PreparedChat(Protocol):
    """A chat request that the model has found good, and the rows of its prompt, by kind."""

    @property
    def prompt_rows(self) -> int: ...
    @property
    def image_rows(self) -> int: ...
    @property
    def audio_rows(self) -> int: ...


class Model(Protocol):
    """The model as the worker drives it; see `DuplexModel`.

    What is called `prepare` and something is for any thread, all else for the device's.
    """

    @property
    def slot_count(self) -> int: ...
    @property
    def context_capacity(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def parameter_count(self) -> int: ...
    @property
    def memory_bytes(self) -> int: ...
    @property
    def sees_frames(self) -> bool: ...
    def prepare_voice(self, options: ConversationOptions) -> None: ...
    def open(self, slot: int, options: ConversationOptions) -> Opened: ...
    def prepare(self, unit: UnitInput) -> UnitInput | UnitFailure: ...
    def step(self, units: Sequence[UnitInput]) -> Iterator[UnitOutput | UnitFailure]: ...
    def settle(self, slots: Sequence[int]) -> Sequence[UnitFailure]: ...
    @property
    def has_chat(self) -> bool: ...
    def prepare_picture(self, picture: Image, max_slices: int | None) -> PreparedImage: ...
    def prepare_chat(self, request: ChatRequest, check: Callable[[], None]) -> PreparedChat: ...
    def open_chat(self, slot: int, prepared: Any) -> None: ...
    def chat_step(self, slots: Sequence[int]) -> Iterator[ChatOutput | UnitFailure]: ...
    def close(self, slot: int) -> None: ...
    def is_clean(self, slot: int) -> bool: ...


class Device(Protocol):
    """Where the model runs. Called on the device thread only, but for `description`."""

    def description(self) -> registry_pb2.Device: ...
    def load(self) -> Model: ...
    def memory_used_bytes(self, model: Model) -> int: ...


@dataclass(frozen=True, slots=True)
class OpenRefused:
    """An option that this model cannot have. The slot may be closed like any other."""

    error: OptionError


@dataclass(frozen=True, slots=True)
class Lost:
    """A call into the model failed; the conversation cannot go on. Its cause is in the log."""


@dataclass(frozen=True, slots=True)
class Taken:
    """A unit that was taken from its inbox. `dropped_count` is the inbox's until then."""

    slot: int
    unit: Unit
    dropped_count: int


@dataclass(frozen=True, slots=True)
class Done:
    """What a unit led to, in a round of `batch_size` units that began at `started_s`."""

    taken: Taken
    result: UnitOutput | UnitFailure
    batch_size: int
    started_s: float


@dataclass(frozen=True, slots=True)
class ChatStep:
    """What a step of a chat led to, in a round with `batch_size` chats."""

    output: ChatOutput
    batch_size: int


Event = Opened | OpenRefused | Lost | Done | Refusal | ChatStep


class Rounds:
    """The model with what the worker must see to around it.

    `post(slot, event)` is called as soon as there is something to tell.
    """

    def __init__(
        self,
        device: Device,
        memory_tolerance_bytes: int,
        post: Callable[[int, Event], None],
    ) -> None:
        self._device = device
        self._tolerance_bytes = memory_tolerance_bytes
        self._post = post
        self.model = device.load()
        self._warm_up()
        self._budget_bytes = device.memory_used_bytes(self.model) + memory_tolerance_bytes
        self.memory_used_bytes = device.memory_used_bytes(self.model)

    def _warm_up(self) -> None:
        """Run a conversation that nobody hears, so that nobody pays for first times."""
        options = ConversationOptions(
            decode_mode=DecodeMode.GREEDY, force_listen_count=0, seed=0, length_penalty=1.0
        )
        self.model.open(0, options)
        noise = np.random.default_rng(0).normal(0, 0.05, INPUT_RATE_HERTZ).astype(np.float32)
        frames = (_WARM_UP_FRAME,) if self.model.sees_frames else ()
        for _ in range(_WARM_UP_UNITS):
            for result in self.model.step([UnitInput(0, noise, frames=frames)]):
                if isinstance(result, UnitFailure) and result.is_fatal:
                    raise RuntimeError(f"the model fails on a unit of noise: {result.message}")
            if self.model.settle([0]):
                raise RuntimeError("the model cannot settle a unit of noise")
        self._clean_up()
        if self.model.has_chat:
            self._warm_up_chat(noise)
            self._clean_up()

    def _warm_up_chat(self, noise: Samples) -> None:
        """Answer a chat that has all that a chat may have, as far as its first speech goes."""
        shown: list[ChatPart] = [ChatImage(_WARM_UP_FRAME)] if self.model.sees_frames else []
        message = ChatMessage(ChatRole.USER, (*shown, ChatAudio(noise), "Hi"))
        options = ChatOptions(
            decode_mode=DecodeMode.GREEDY, max_new_tokens=20, seed=0, max_slices=1
        )
        spoken = replace(options, generate_audio=True)
        try:
            prepared = self.model.prepare_chat(ChatRequest((message,), spoken), go_on)
        except OptionError:  # a model without a voice
            prepared = self.model.prepare_chat(ChatRequest((message,), options), go_on)
        self.model.open_chat(0, prepared)
        for _ in range(_WARM_UP_CHAT_STEPS):
            for result in self.model.chat_step([0]):
                if isinstance(result, UnitFailure):
                    raise RuntimeError(f"the model fails on a chat: {result.message}")
                if result.finish is not None:
                    return

    def _clean_up(self) -> None:
        self.model.close(0)
        if not self.model.is_clean(0):
            raise RuntimeError("the model does not clean up after a conversation")

    def open(self, slot: int, options: ConversationOptions) -> bool:
        """Open a conversation; tell whether units may come."""
        try:
            opened = self.model.open(slot, options)
        except OptionError as error:
            self._post(slot, OpenRefused(error))
            return False
        except Exception:  # noqa: BLE001 - the model's faults stop here, logged whole
            _log.exception("slot %d: open failed", slot)
            self._post(slot, Lost())
            return False
        self._post(slot, opened)
        return True

    def run(self, batch: Sequence[Taken]) -> set[int]:
        """Run one unit of each of several slots together and settle; return the slots lost."""
        started_s = time.monotonic()
        waiting = {taken.slot: taken for taken in batch}
        lost: set[int] = set()
        try:
            for result in self.model.step([_input(taken) for taken in batch]):
                taken = waiting.pop(result.slot)
                self._post(result.slot, Done(taken, result, len(batch), started_s))
                if isinstance(result, UnitFailure) and result.is_fatal:
                    lost.add(result.slot)
            if waiting:
                raise RuntimeError(f"the model left slots {sorted(waiting)} without an answer")
            for failure in self.model.settle([t.slot for t in batch if t.slot not in lost]):
                self._post(failure.slot, Lost())
                lost.add(failure.slot)
        except Exception:  # noqa: BLE001 - the model's faults stop here, logged whole
            # The model could not say whose fault it was: any of them may have a broken cache now.
            _log.exception("a round of slots %s failed", [taken.slot for taken in batch])
            for slot in {taken.slot for taken in batch} - lost:
                self._post(slot, Lost())
            return {taken.slot for taken in batch}
        return lost

    def open_chat(self, slot: int, prepared: PreparedChat) -> bool:
        """Open a chat; tell whether it may be stepped."""
        try:
            self.model.open_chat(slot, prepared)
        except Exception:  # noqa: BLE001 - the model's faults stop here, logged whole
            _log.exception("slot %d: a chat could not be opened", slot)
            self._post(slot, Lost())
            return False
        return True

    def chat(self, slots: Sequence[int]) -> set[int]:
        """Do one short thing for several chats together; return the slots that have ended."""
        ended: set[int] = set()
        try:
            for result in self.model.chat_step(slots):
                if isinstance(result, UnitFailure):
                    _log.error("slot %d: a chat failed: %s", result.slot, result.message)
                    self._post(result.slot, Lost())
                    ended.add(result.slot)
                    continue
                self._post(result.slot, ChatStep(result, len(slots)))
                if result.finish is not None:
                    ended.add(result.slot)
        except Exception:  # noqa: BLE001 - the model's faults stop here, logged whole
            _log.exception("a step of the chats in slots %s failed", slots)
            for slot in set(slots) - ended:
                self._post(slot, Lost())
            return set(slots)
        return ended

    def close(self, slot: int) -> bool:
        """Clean the slot; tell whether it may be leased again."""
        try:
            self.model.close(slot)
            is_clean = self.model.is_clean(slot)
            self.memory_used_bytes = self._device.memory_used_bytes(self.model)
        except Exception:  # noqa: BLE001 - the model's faults stop here, logged whole
            _log.exception("slot %d: cleanup failed", slot)
            return False
        if not is_clean:
            _log.error("slot %d is not clean after its cleanup", slot)
            return False
        if self.memory_used_bytes > self._budget_bytes:
            _log.error(
                "slot %d: the device holds %d bytes after its cleanup, %d are allowed",
                *(slot, self.memory_used_bytes, self._budget_bytes),
            )
            return False
        return True


def _input(taken: Taken) -> UnitInput:
    unit = taken.unit
    return UnitInput(taken.slot, unit.audio, unit.force_listen, unit.frames, unit.max_slices)
