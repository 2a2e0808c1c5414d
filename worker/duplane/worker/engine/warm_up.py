"""Runs a conversation and a chat before the worker serves, because first calls are slow.

First calls allocate buffers, load kernels and plan convolutions. The input is noise. If the model
fails on this input, the worker does not start to serve.
"""

from __future__ import annotations

import base64
from dataclasses import replace

import numpy as np

from duplane.fabric.audio import INPUT_RATE_HERTZ, Samples
from duplane.worker.engine.interfaces import Model
from duplane.worker.models.minicpm_o.chat.types import (
    ChatAudio,
    ChatImage,
    ChatMessage,
    ChatOptions,
    ChatPart,
    ChatRequest,
    ChatRole,
)
from duplane.worker.models.minicpm_o.types import (
    ConversationOptions,
    DecodeMode,
    OptionError,
    Unit,
    UnitFailure,
)

_UNITS = 3
_CHAT_STEPS = 4  # prompt, text, speech, and the text after the speech
_FRAME = base64.b64decode(  # a PNG of one grey pixel, which the model scales up
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNoAAAAggCBd81ytgAAAABJRU5ErkJggg=="
)


def warm_up(model: Model) -> None:
    """Run all stages once in slot 0 and clean the slot. Raises RuntimeError if the model fails."""
    noise = np.random.default_rng(0).normal(0, 0.05, INPUT_RATE_HERTZ).astype(np.float32)
    _run_units(model, noise)
    _clean_up(model)
    if model.has_chat:
        _run_chat(model, noise)
        _clean_up(model)


def _run_units(model: Model, noise: Samples) -> None:
    options = ConversationOptions(
        decode_mode=DecodeMode.GREEDY, force_listen_count=0, seed=0, length_penalty=1.0
    )
    model.open(0, options)
    frames = (_FRAME,) if model.sees_frames else ()
    for _ in range(_UNITS):
        for result in model.step([Unit(0, noise, frames=frames)]):
            if isinstance(result, UnitFailure) and result.is_fatal:
                raise RuntimeError(f"the model fails on a unit of noise: {result.message}")
        if model.settle([0]):
            raise RuntimeError("the model cannot settle a unit of noise")


def _run_chat(model: Model, noise: Samples) -> None:
    """Answer a chat with a picture, a sound and text, up to the first speech."""
    pictures: list[ChatPart] = [ChatImage(_FRAME)] if model.sees_frames else []
    message = ChatMessage(ChatRole.USER, (*pictures, ChatAudio(noise), "Hi"))
    options = ChatOptions(decode_mode=DecodeMode.GREEDY, max_new_tokens=20, seed=0, max_slices=1)
    spoken = replace(options, generate_audio=True)
    try:
        prepared = model.prepare_chat(ChatRequest((message,), spoken), _go_on)
    except OptionError:  # the checkpoint has no voice
        prepared = model.prepare_chat(ChatRequest((message,), options), _go_on)
    model.open_chat(0, prepared)
    for _ in range(_CHAT_STEPS):
        for result in model.chat_step([0]):
            if isinstance(result, UnitFailure):
                raise RuntimeError(f"the model fails on a chat: {result.message}")
            if result.finish is not None:
                return


def _go_on() -> None:
    """Do nothing, so that the preparation of the chat continues."""


def _clean_up(model: Model) -> None:
    model.close(0)
    if not model.is_clean(0):
        raise RuntimeError("the model does not clean up after a conversation")
