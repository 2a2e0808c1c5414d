"""Runs conversations with the worker's model in this process, without a fabric."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np

from duplane.worker.models.chat import (
    ChatImage,
    ChatMessage,
    ChatOptions,
    ChatRequest,
    ChatRole,
)
from duplane.worker.models.minicpm_o.audio.mel import UNIT_SAMPLES
from duplane.worker.models.minicpm_o.model import DuplexModel
from duplane.worker.models.types import ConversationOptions, Unit, UnitFailure
from training.evaluation.inputs import ChatInput, SessionInput
from training.evaluation.scores import Answered

CONTEXT_ROWS = 1024
_LENGTH_PENALTY = 1.0  # of chats in dialect D

_Input = TypeVar("_Input")


class ModelRunner:
    """A `Runner` that calls the model. Its methods raise RuntimeError if a unit or chat fails."""

    def __init__(self, model: DuplexModel) -> None:
        self._model = model

    async def sessions(self, inputs: Sequence[SessionInput]) -> list[list[Answered]]:
        """Return the outputs of all units of each session."""
        return [units for some in self._batches(inputs) for units in self._run_sessions(some)]

    async def chats(self, inputs: Sequence[ChatInput]) -> list[str]:
        """Return the text of each answer."""
        return [text for some in self._batches(inputs) for text in self._run_chats(some)]

    def _batches(self, inputs: Sequence[_Input]) -> Iterator[Sequence[_Input]]:
        count = self._model.slot_count
        return (inputs[start : start + count] for start in range(0, len(inputs), count))

    def _run_sessions(self, inputs: Sequence[SessionInput]) -> list[list[Answered]]:
        model, slots = self._model, range(len(inputs))
        found: list[list[Answered]] = [[] for _ in slots]
        try:
            for slot, one in enumerate(inputs):
                options = ConversationOptions(
                    system_prompt=one.prompt, llm_voice=one.voice, seed=one.seed
                )
                model.open(slot, options)
            for begin in range(0, len(inputs[0].samples), UNIT_SAMPLES):
                units = [
                    Unit(
                        slot,
                        np.ascontiguousarray(one.samples[begin : begin + UNIT_SAMPLES]),
                        frames=one.frames(begin // UNIT_SAMPLES),
                    )
                    for slot, one in enumerate(inputs)
                ]
                for output in model.step(units):
                    if isinstance(output, UnitFailure):
                        raise RuntimeError(f"{output.reason}: {output.message}")
                    speaks = not output.is_listen
                    found[output.slot].append(Answered(speaks, output.text, output.end_of_turn))
                model.settle(slots)
        finally:
            for slot in slots:
                model.close(slot)
        return found

    def _run_chats(self, inputs: Sequence[ChatInput]) -> list[str]:
        model, texts = self._model, [""] * len(inputs)
        going = set(range(len(inputs)))
        try:
            for slot, one in enumerate(inputs):
                model.open_chat(slot, model.preparer.chat(chat_request(one)))
            while going:
                for output in model.chat_step(sorted(going)):
                    if isinstance(output, UnitFailure):
                        raise RuntimeError(f"{output.reason}: {output.message}")
                    texts[output.slot] += output.text
                    if output.finish is not None:
                        going.discard(output.slot)
        finally:
            for slot in range(len(inputs)):
                model.close(slot)
        return texts


def chat_request(one: ChatInput) -> ChatRequest:
    """Return the request of a chat, as an edge sends it to the worker."""
    messages = [ChatMessage(ChatRole(role), (text,)) for role, text in one.messages]
    if one.picture is not None:
        last = messages[-1]
        messages[-1] = ChatMessage(last.role, (ChatImage(one.picture), *last.parts))
    options = ChatOptions(
        length_penalty=_LENGTH_PENALTY,
        generate_audio=one.is_spoken,
        seed=one.seed,
        use_image_id=True,
    )
    return ChatRequest(tuple(messages), options)
