"""Runs a conversation and a chat before the worker serves, because first calls are slow.

First calls allocate buffers, load kernels and plan convolutions. The input is noise. If the model
fails on this input, the worker does not start to serve.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from duplane.worker.engine.drive import drive
from duplane.worker.models.chat import (
    ChatAudio,
    ChatImage,
    ChatMessage,
    ChatOptions,
    ChatPart,
    ChatRequest,
    ChatRole,
)
from duplane.worker.models.interface import (
    Item,
    Model,
    Open,
    Preparer,
    Result,
    RunUnit,
    StartChat,
)
from duplane.worker.models.types import (
    ConversationOptions,
    DecodeMode,
    FloatArray,
    OptionError,
    SpeechRequest,
    Unit,
    UnitFailure,
    UnitOutput,
)

_UNITS = 3
_OPTIONS = ConversationOptions(
    decode_mode=DecodeMode.GREEDY, force_listen_count=0, seed=0, length_penalty=1.0
)
_UNIT = "a unit of noise"
_FRAME = base64.b64decode(  # a PNG of one grey pixel, which the model scales up
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNoAAAAggCBd81ytgAAAABJRU5ErkJggg=="
)


def warm_up(preparer: Preparer, model: Model) -> None:
    """Run all stages once in slot 0, and in more slots if the device plans each batch size.

    Then clean the slots. Raises RuntimeError if the model fails.
    """
    constants = model.constants
    sample_count = round(constants.unit_s * constants.input_hertz)
    noise = np.random.default_rng(0).normal(0, 0.05, sample_count).astype(np.float32)
    _run_units(preparer, model, noise)
    if constants.has_chat:
        _run_chat(preparer, model, noise)
    if constants.plans_batches:
        powers = range((constants.slot_count - 1).bit_length())
        # 1, 2, 4 and so on, and all slots
        for count in (*(1 << power for power in powers), constants.slot_count):
            _run_units(preparer, model, noise, count, speaks=True)


def _run_units(
    preparer: Preparer, model: Model, noise: FloatArray, count: int = 1, *, speaks: bool = False
) -> None:
    """Run units of several conversations together; they see, or they speak, if the model can."""
    constants = model.constants
    frames = (_FRAME,) if constants.accepts_pictures and not speaks else ()
    requests = (SpeechRequest(0, "Hi."),) if constants.accepts_speech_requests and speaks else ()
    for slot in range(count):
        _finish(model, [Open(slot, preparer.conversation(_OPTIONS))], _UNIT)
    for number in range(_UNITS):
        speech = requests if number == 0 else ()
        units = [Unit(slot, noise, frames=frames, speech=speech) for slot in range(count)]
        results = _finish(model, [_prepared(preparer, unit) for unit in units], _UNIT)
        if sum(isinstance(result, UnitOutput | UnitFailure) for result in results) < count:
            raise RuntimeError("the model does not answer a unit of noise")
    _clean_up(model, count)


def _prepared(preparer: Preparer, unit: Unit) -> RunUnit:
    prepared = preparer.unit(unit)
    if isinstance(prepared, UnitFailure):
        raise RuntimeError(f"the model refuses a unit of noise: {prepared.message}")
    return RunUnit(prepared)


def _run_chat(preparer: Preparer, model: Model, noise: FloatArray) -> None:
    """Answer a chat with a picture, a sound and text; with speech if the checkpoint has a voice."""
    pictures: list[ChatPart] = [ChatImage(_FRAME)] if model.constants.accepts_pictures else []
    message = ChatMessage(ChatRole.USER, (*pictures, ChatAudio(noise), "Hi"))
    options = ChatOptions(decode_mode=DecodeMode.GREEDY, max_new_tokens=20, seed=0, max_slices=1)
    spoken = replace(options, generate_audio=True)
    try:
        prepared = preparer.chat(ChatRequest((message,), spoken), lambda: None)
    except OptionError:  # the checkpoint has no voice
        prepared = preparer.chat(ChatRequest((message,), options), lambda: None)
    _finish(model, [StartChat(0, prepared)], "a chat")
    _clean_up(model)


def _finish(model: Model, items: Sequence[Item], what: str) -> list[Result]:
    """Advance items until nothing of them is left; return all results.

    Raises RuntimeError that names `what` for a fatal failure.
    """
    results = list(drive(model, items))
    for result in results:
        if isinstance(result, UnitFailure) and result.is_fatal:
            raise RuntimeError(f"the model fails on {what}: {result.message}")
    return results


def _clean_up(model: Model, count: int = 1) -> None:
    for slot in range(count):
        model.close(slot)
        if not model.is_clean(slot):
            raise RuntimeError("the model does not clean up after a conversation")
