"""Checks the settings of `Open` and translates them to the model's options. Pure.

A refusal names the invalid field.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from duplane.fabric.bounds import DUPLEX_CONFIG
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.v1 import session_pb2
from duplane.worker.models.types import ConversationOptions, OptionError, WindowMode
from duplane.worker.session.fields import DECODE_MODES, invalid, read_numbers, read_voice
from duplane.worker.settings import SessionLimits

# For each enum field of DuplexConfig, a table from its values to the values of the model.
_CHOICES: dict[str, Mapping[int, Enum]] = {
    "decode_mode": DECODE_MODES,
    "context_window": {
        session_pb2.CONTEXT_WINDOW_OFF: WindowMode.OFF,
        session_pb2.CONTEXT_WINDOW_BASIC: WindowMode.BASIC,
        session_pb2.CONTEXT_WINDOW_CONTEXT: WindowMode.CONTEXT,
    },
}
_MODEL_NAMES = {
    "max_new_speak_token_count": "max_new_speak_tokens_per_chunk",
    "context_window": "sliding_window_mode",
    "basic_window_high_token_count": "basic_window_high_tokens",
    "basic_window_low_token_count": "basic_window_low_tokens",
    "context_window_unit_count": "context_max_units",
    "context_window_previous_token_count": "context_previous_max_tokens",
}
_PATHS = {
    _MODEL_NAMES.get(name, name): f"config.{name}"
    for name in ("generate_audio", *DUPLEX_CONFIG, *_CHOICES)
}


def field_path(option: str) -> str:
    """Return the path of the field in `Open` that sets one of the model's options."""
    return _PATHS.get(option, option)


def sent_paths(request: session_pb2.Open) -> frozenset[str]:
    """Return the paths of all fields that the client has set."""
    paths = {field.name for field, _ in request.ListFields()}
    return frozenset(paths | {f"config.{field.name}" for field, _ in request.config.ListFields()})


def conversation_options(
    request: session_pb2.Open, limits: SessionLimits, input_hertz: int
) -> tuple[ConversationOptions, frozenset[str]]:
    """Return the options that `request` sets, and the paths of voices that are too short.

    Absent fields keep the model's defaults. `input_hertz` is the rate of the voices.

    Raises FabricError INVALID_FIELD with the path of the field in `Open`.
    """
    chosen: dict[str, Any] = _config(request.config)
    if request.HasField("system_prompt"):
        size = len(request.system_prompt.encode())
        if size > limits.max_prompt_bytes:
            raise invalid("system_prompt", f"is {size} bytes, more than {limits.max_prompt_bytes}")
        chosen["system_prompt"] = request.system_prompt
    if request.HasField("seed"):
        chosen["seed"] = request.seed
    voices = {"llm_voice": request.llm_voice, "tts_voice": request.tts_voice}
    for name, pcm in voices.items():
        if pcm:
            chosen[name] = read_voice(name, pcm, input_hertz, limits.max_voice_s)
    short = frozenset(name for name in voices if chosen.get(name, name) is None)
    try:
        return ConversationOptions(**chosen), short
    except OptionError as error:
        raise invalid_option(error) from None


def invalid_option(error: OptionError) -> FabricError:
    """Return the error of an option that the model refuses, with the contract's field."""
    return FabricError(Reason.INVALID_FIELD, str(error), field=field_path(error.field))


def token_limit(request: session_pb2.Open, worker_limit: int) -> int:
    """Return the context limit that applies. Raises FabricError INVALID_FIELD."""
    if not request.HasField("context_token_limit"):
        return worker_limit
    if request.context_token_limit < 1:
        raise invalid("context_token_limit", f"is {request.context_token_limit}, must be above 0")
    return min(request.context_token_limit, worker_limit)


def _config(config: session_pb2.DuplexConfig) -> dict[str, Any]:
    chosen: dict[str, Any] = read_numbers(config, DUPLEX_CONFIG, _MODEL_NAMES)
    if config.HasField("generate_audio"):
        chosen["generate_audio"] = config.generate_audio
    for name, choices in _CHOICES.items():
        number: int = getattr(config, name)
        if not number:
            continue
        if number not in choices:
            raise invalid(f"config.{name}", f"is {number}, not a known mode")
        chosen[_MODEL_NAMES.get(name, name)] = choices[number]
    return chosen
