"""`WorkerModel`: the interface of the worker's engine, on top of `DuplexModel`."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import assert_never, cast

import torch

from duplane.worker.models.interface import (
    Continue,
    DeviceLostError,
    Item,
    ModelConstants,
    Open,
    Part,
    Rebuild,
    Result,
    RunUnit,
    StartChat,
    Unfinished,
    VoiceReady,
)
from duplane.worker.models.minicpm_o.chat.chats import PREFILL_ROWS
from duplane.worker.models.minicpm_o.chat.prompt import PreparedChat
from duplane.worker.models.minicpm_o.model import DuplexModel
from duplane.worker.models.minicpm_o.preparer import PreparedConversation
from duplane.worker.models.minicpm_o.types import INPUT_SAMPLE_RATE, OUTPUT_SAMPLE_RATE, UNIT_S
from duplane.worker.models.types import Unit, UnitFailure


class WorkerModel:
    """Implements `interface.Model` for one `DuplexModel`."""

    def __init__(self, model: DuplexModel) -> None:
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
        )

    def advance(self, items: Sequence[Item], row_budget: int) -> Iterator[Result]:
        """Do work for each item; see `interface.Model`. Units run together, and so do chats."""
        with _device_errors():
            yield from self._advance(items, row_budget)

    def _advance(self, items: Sequence[Item], row_budget: int) -> Iterator[Result]:
        units: list[Unit] = []
        begun: list[int] = []
        chats: list[int] = []
        for item in items:
            match item:
                case RunUnit(unit) if not unit.frames or item.rows <= row_budget:
                    units.append(unit)
                case Continue(part=Part.PICTURES) if item.rows <= row_budget:
                    begun.append(item.slot)
                case Continue(part=Part.CHAT):
                    chats.append(item.slot)
                case _:
                    yield self._advance_alone(item, row_budget)
        if units or begun:
            yield from self._run(units, begun)
        if chats:
            yield from self._model.chat_step(chats)

    def _advance_alone(self, item: Item, row_budget: int) -> Result:
        """Do work that is not batched with the work of other slots."""
        model, slot = self._model, item.slot
        match item:
            case Open():
                model.begin(slot, cast("PreparedConversation", item.conversation))
                return self._feed_prompt(slot, item.rows, row_budget)
            case StartChat():
                model.open_chat(slot, cast("PreparedChat", item.chat))
                return Unfinished(slot, Part.CHAT, item.rows)
            case Rebuild():
                return model.rebuild(slot, item.units)
            case RunUnit(unit):
                return _pictures(slot, model.feed_ahead(unit, row_budget))
            case Continue():
                return self._continue(item, row_budget)
            case _:
                assert_never(item)

    def _continue(self, item: Continue, row_budget: int) -> Result:
        """Continue the work of one slot that is not batched."""
        model, slot = self._model, item.slot
        if item.part is Part.PROMPT:
            return self._feed_prompt(slot, item.rows, row_budget)
        if item.part is Part.PICTURES:
            return _pictures(slot, model.feed_more(slot, row_budget))
        model.start_turn(slot)
        return VoiceReady(slot)

    def _feed_prompt(self, slot: int, rows: int, row_budget: int) -> Result:
        """Feed at most `row_budget` of the `rows` that are left of a prompt."""
        opened = self._model.feed_prompt(slot, row_budget)
        return opened or Unfinished(slot, Part.PROMPT, rows - row_budget)

    def _run(self, units: Sequence[Unit], begun: Sequence[int]) -> Iterator[Result]:
        """Run and settle units. Then report the conversations that await a voice."""
        model, lost = self._model, set[int]()
        slots = {*begun, *(unit.slot for unit in units)}
        for result in model.step(units, begun=begun):
            if isinstance(result, UnitFailure) and result.is_fatal:
                lost.add(result.slot)
            yield result
        for failure in model.settle(sorted(slots - lost)):
            lost.add(failure.slot)
            yield failure
        for slot in sorted(slots - lost):
            if model.awaits_voice(slot):
                yield Unfinished(slot, Part.VOICE, PREFILL_ROWS)

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


def _pictures(slot: int, left: int | UnitFailure) -> Result:
    """Return the result of feeding some pictures, with the number of rows that are left."""
    return left if isinstance(left, UnitFailure) else Unfinished(slot, Part.PICTURES, left)
