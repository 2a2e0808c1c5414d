"""What a client asks for in `open` and in a unit, checked and made into the model's own terms.

Decides which values are refused, naming the field at fault. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from typing import Any

import numpy as np

from duplane.fabric.audio import INPUT_RATE_HERTZ, AudioError, Samples, is_wav, samples_from_pcm
from duplane.fabric.bounds import DUPLEX_CONFIG
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.v1 import session_pb2
from duplane.worker.inbox import Refusal, Unit
from duplane.worker.model.types import (
    ConversationOptions,
    DecodeMode,
    OptionError,
    UnitFailure,
    UnitInput,
    WindowMode,
)
from duplane.worker.rounds import Model
from duplane.worker.settings import SessionLimits

UNIT_TOO_LONG = "UNIT_TOO_LONG"
PAUSED = "PAUSED"

DECODE_MODES: dict[int, Enum] = {
    session_pb2.DECODE_MODE_SAMPLING: DecodeMode.SAMPLING,
    session_pb2.DECODE_MODE_GREEDY: DecodeMode.GREEDY,
}
# Field of DuplexConfig -> what its values are called in the model.
_CHOICES: dict[str, dict[int, Enum]] = {
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
    """Return the path in `Open` of what the model calls `option`."""
    return _PATHS.get(option, option)


def sent_paths(wish: session_pb2.Open) -> frozenset[str]:
    """Return the paths of all fields that the client has set."""
    paths = {field.name for field, _ in wish.ListFields()}
    return frozenset(paths | {f"config.{field.name}" for field, _ in wish.config.ListFields()})


def conversation_options(wish: session_pb2.Open, limits: SessionLimits) -> ConversationOptions:
    """Return what `wish` asks for; what it leaves out is left to the model.

    Raises FabricError INVALID_FIELD with the path of the field in `Open`.
    """
    chosen: dict[str, Any] = _config(wish.config)
    if wish.HasField("system_prompt"):
        size = len(wish.system_prompt.encode())
        if size > limits.max_prompt_bytes:
            raise invalid("system_prompt", f"is {size} bytes, more than {limits.max_prompt_bytes}")
        chosen["system_prompt"] = wish.system_prompt
    if wish.HasField("seed"):
        chosen["seed"] = wish.seed
    for name, pcm in (("llm_voice", wish.llm_voice), ("tts_voice", wish.tts_voice)):
        if pcm:
            chosen[name] = voice(name, pcm, limits.max_voice_s)
    try:
        return ConversationOptions(**chosen)
    except OptionError as error:
        raise invalid_option(error) from None


def invalid_option(error: OptionError) -> FabricError:
    """Translate the model's refusal of an option."""
    return FabricError(Reason.INVALID_FIELD, str(error), field=field_path(error.field))


def token_limit(wish: session_pb2.Open, worker_limit: int) -> int:
    """Return the context limit in force. Raises FabricError INVALID_FIELD."""
    if not wish.HasField("context_token_limit"):
        return worker_limit
    if wish.context_token_limit < 1:
        raise invalid("context_token_limit", f"is {wish.context_token_limit}, must be above 0")
    return min(wish.context_token_limit, worker_limit)


def _config(config: session_pb2.DuplexConfig) -> dict[str, Any]:
    chosen: dict[str, Any] = numbers(config, DUPLEX_CONFIG, _MODEL_NAMES)
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


def numbers(
    config: session_pb2.DuplexConfig | session_pb2.ChatConfig,
    bounds: Mapping[str, tuple[float, float]],
    model_names: Mapping[str, str],
) -> dict[str, float]:
    """Return the numbers that `config` sets, as the model calls them.

    Raises FabricError INVALID_FIELD for one that is out of its bounds.
    """
    chosen: dict[str, float] = {}
    for name, (low, high) in bounds.items():
        if not config.HasField(name):  # pyright: ignore[reportArgumentType] - names are checked
            continue
        value: float = getattr(config, name)
        if not low <= value <= high:
            raise invalid(f"config.{name}", f"is {value:g}, not between {low:g} and {high:g}")
        chosen[model_names.get(name, name)] = value
    return chosen


def voice(name: str, pcm: bytes, max_s: float) -> Samples:
    """Return the samples of a voice. Raises FabricError INVALID_FIELD naming `name`."""
    try:
        samples = _samples(pcm)
    except AudioError as error:
        raise invalid(name, str(error)) from None
    seconds = samples.size / INPUT_RATE_HERTZ
    if seconds > max_s:
        raise invalid(name, f"lasts {seconds:.1f} s, more than {max_s:g} s")
    return samples


def _samples(pcm: bytes) -> Samples:
    """Return 16 kHz samples that may be written to, as torch insists. Raises AudioError."""
    if is_wav(pcm):
        raise AudioError("a WAV file, must be bare float32 samples")
    return np.array(samples_from_pcm(pcm))


def invalid(path: str, fault: str) -> FabricError:
    """Return the refusal of the field at `path`."""
    return FabricError(Reason.INVALID_FIELD, f"{path} {fault}", field=path)


class _UnitError(Exception):
    def __init__(self, message: str, field: str = "", reason: str = Reason.INVALID_FIELD) -> None:
        super().__init__(message)
        self.field = field
        self.reason = reason


def check_unit(
    unit: session_pb2.Unit,
    limits: SessionLimits,
    *,
    last_sequence: int,
    is_omni: bool,
    is_paused: bool,
    received_s: float,
    receive_time_ns: int,
) -> Unit | Refusal:
    """Return the unit if it can be used, else the answer that says why not."""
    trace = unit.trace if unit.HasField("trace") else None
    try:
        if unit.sequence <= last_sequence:
            fault = f"sequence is {unit.sequence}, not above {last_sequence}"
            raise _UnitError(fault, "sequence")
        if is_paused:
            raise _UnitError("the session is paused", reason=PAUSED)
        max_slices = _check_frames(unit, limits, is_omni=is_omni)
        samples = _unit_samples(unit, limits.max_unit_s)
    except _UnitError as error:
        return Refusal(unit.sequence, error.reason, str(error), error.field, receive_time_ns, trace)
    return Unit(
        unit.sequence,
        samples,
        unit.force_listen,
        received_s,
        receive_time_ns,
        trace,
        tuple(unit.video_frames),
        max_slices,
    )


def _check_frames(unit: session_pb2.Unit, limits: SessionLimits, *, is_omni: bool) -> int:
    """Refuse frames that are too many or too large; the bound of slices that is in force."""
    if unit.video_frames and not is_omni:
        raise _UnitError("video_frames can only come in an omni session", "video_frames")
    count = len(unit.video_frames)
    if count > limits.max_frame_count:
        fault = f"video_frames are {count}, more than {limits.max_frame_count}"
        raise _UnitError(fault, "video_frames")
    for index, frame in enumerate(unit.video_frames):
        if len(frame) > limits.max_frame_bytes:
            fault = f"is {len(frame)} bytes, more than {limits.max_frame_bytes}"
            raise _UnitError(f"video_frames[{index}] {fault}", "video_frames")
    slices = unit.max_slice_count if unit.HasField("max_slice_count") else 1
    if not 1 <= slices <= limits.max_slice_count:
        fault = f"max_slice_count is {slices}, not between 1 and {limits.max_slice_count}"
        raise _UnitError(fault, "max_slice_count")
    return slices


def _unit_samples(unit: session_pb2.Unit, max_s: float) -> Samples:
    if unit.forced_token_ids:
        raise _UnitError("forced_token_ids are not served by this worker", "forced_token_ids")
    try:
        samples = _samples(unit.audio)
    except AudioError as error:
        raise _UnitError(f"audio: {error}", "audio") from None
    if not (samples.size or unit.video_frames):
        raise _UnitError("audio is empty", "audio")
    seconds = samples.size / INPUT_RATE_HERTZ
    if seconds > max_s:
        fault = f"audio lasts {seconds:.1f} s, more than {max_s:g} s"
        raise _UnitError(fault, "audio", UNIT_TOO_LONG)
    return samples


def prepare_frames(model: Model, unit: Unit) -> Unit | Refusal:
    """Decode the unit's frames, for any thread but the device's; or the answer that says why not.

    It takes milliseconds per frame.
    """
    shown = UnitInput(0, unit.audio, unit.force_listen, unit.frames, unit.max_slices)
    prepared = model.prepare(shown)
    if isinstance(prepared, UnitFailure):
        return Refusal(
            unit.sequence,
            prepared.reason,
            prepared.message,
            "video_frames",
            unit.receive_time_ns,
            unit.trace,
        )
    return replace(unit, frames=prepared.frames)
