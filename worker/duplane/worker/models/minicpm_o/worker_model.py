"""`WorkerModel`: the interface of the worker's engine, on top of `DuplexModel`."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, cast

import torch

from duplane.worker.models.interface import (
    Continue,
    DeviceLostError,
    Item,
    ModelConstants,
    Open,
    Rebuild,
    Result,
    RunUnit,
    StartChat,
)
from duplane.worker.models.minicpm_o.chat.prompt import PreparedChat
from duplane.worker.models.minicpm_o.model import DuplexModel
from duplane.worker.models.minicpm_o.preparer import PreparedConversation
from duplane.worker.models.minicpm_o.types import INPUT_SAMPLE_RATE, OUTPUT_SAMPLE_RATE, UNIT_S


class WorkerModel:
    """Implements `interface.Model` for one `DuplexModel`."""

    def __init__(self, model: DuplexModel, *, lane_count: Literal[1, 2] = 1) -> None:
        """Serve `model`, which must not change its memory later."""
        self._model = model
        self.constants = ModelConstants(
            slot_count=model.slot_count,
            context_capacity=model.context_capacity,
            name=model.name,
            digest=model.digest,
            parameter_count=model.parameter_count,
            memory_bytes=model.memory_bytes,
            unit_s=UNIT_S,
            input_hertz=INPUT_SAMPLE_RATE,
            output_hertz=OUTPUT_SAMPLE_RATE,
            accepts_pictures=model.parts.vision is not None,
            has_chat=model.has_chat,
            accepts_speech_requests=True,
            plans_batches=model.llm.cache.keys.device.type == "cuda",
            accepts_unfed_units=True,
            lane_count=lane_count,
        )

    def advance(self, items: Sequence[Item]) -> Iterator[Result]:
        """Do the work of one block; see `interface.Model`."""
        with _device_errors():
            yield from self._advance(items)

    def _advance(self, items: Sequence[Item]) -> Iterator[Result]:
        units = [item.unit for item in items if isinstance(item, RunUnit)]
        continued = [item for item in items if isinstance(item, Continue)]
        if units:
            yield from self._model.accept(units)
        if continued:
            yield from self._model.launch(continued)
        for item in items:
            match item:
                case Open():
                    prepared = cast("PreparedConversation", item.conversation)
                    yield self._model.begin(item.slot, prepared)
                case StartChat():
                    yield self._model.open_chat(item.slot, cast("PreparedChat", item.chat))
                case Rebuild():
                    yield self._model.rebuild(item.slot, item.units)
                case RunUnit() | Continue():
                    pass

    def close(self, slot: int) -> None:
        """Remove the conversation or chat of the slot and zero its state."""
        with _device_errors():
            self._model.close(slot)

    def is_clean(self, slot: int) -> bool:
        """Return whether no state of a conversation or chat is left in the slot."""
        with _device_errors():
            return self._model.is_clean(slot)


@contextmanager
def _device_errors() -> Generator[None]:
    """Turn an error of the device itself into DeviceLostError."""
    try:
        yield
    except torch.AcceleratorError as error:
        raise DeviceLostError(f"{type(error).__name__}: {error}") from error
