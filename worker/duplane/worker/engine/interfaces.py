"""The interfaces of model and device that the engine uses. Tests use scripted implementations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from PIL.Image import Image

from duplane.fabric.v1 import registry_pb2
from duplane.worker.model.chat.types import ChatOutput, ChatRequest
from duplane.worker.model.types import (
    ConversationOptions,
    Opened,
    PastUnit,
    PreparedImage,
    Rebuilt,
    Unit,
    UnitFailure,
    UnitOutput,
)


class PreparedChat(Protocol):
    """A chat request that the model has accepted.

    `prompt_rows` is the number of all rows of the prompt; `image_rows` and `audio_rows` are parts
    of it. `uses_tts_voice` means that the answer is spoken with the voice of the request.
    """

    @property
    def prompt_rows(self) -> int: ...
    @property
    def image_rows(self) -> int: ...
    @property
    def audio_rows(self) -> int: ...
    @property
    def uses_tts_voice(self) -> bool: ...


class Model(Protocol):
    """The model; see `DuplexModel`.

    Any thread may use the constants, `row_count` and the methods whose name begins with `prepare`.
    Only the device thread may call the other methods.
    """

    @property
    def slot_count(self) -> int: ...
    @property
    def context_capacity(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def digest(self) -> str: ...
    @property
    def parameter_count(self) -> int: ...
    @property
    def memory_bytes(self) -> int: ...
    @property
    def sees_frames(self) -> bool: ...
    @property
    def has_chat(self) -> bool: ...

    def row_count(self, unit: Unit) -> int: ...
    def prepare_voice(self, options: ConversationOptions) -> None: ...
    def prepare(self, unit: Unit) -> Unit | UnitFailure: ...
    def prepare_picture(self, picture: Image, max_slices: int | None) -> PreparedImage: ...
    def prepare_chat(self, request: ChatRequest, check: Callable[[], None]) -> PreparedChat: ...

    def open(self, slot: int, options: ConversationOptions) -> Opened: ...
    def step(self, units: Sequence[Unit]) -> Iterator[UnitOutput | UnitFailure]: ...
    def settle(self, slots: Sequence[int]) -> Sequence[UnitFailure]: ...
    def rebuild(self, slot: int, units: Sequence[PastUnit]) -> Rebuilt | UnitFailure: ...
    def open_chat(self, slot: int, prepared: Any) -> None: ...
    def chat_step(self, slots: Sequence[int]) -> Iterator[ChatOutput | UnitFailure]: ...
    def close(self, slot: int) -> None: ...
    def is_clean(self, slot: int) -> bool: ...


class Device(Protocol):
    """The device that the model runs on.

    The device thread calls all methods but `description`, which any thread may call.
    """

    def description(self) -> registry_pb2.Device: ...
    def load(self) -> Model: ...
    def memory_used_bytes(self, model: Model) -> int: ...

    def check(self) -> None:
        """Raise the device's error if the device cannot be used any more."""


class DeviceLostError(Exception):
    """The device has failed, and only a new process can use it again."""
