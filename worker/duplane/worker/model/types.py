"""What goes into the model and what comes out of it, as plain values: numpy only, no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # it needs what this module does without
    from duplane.worker.model.images import PreparedImage

FloatArray = NDArray[np.float32]

INPUT_SAMPLE_RATE = 16_000
OUTPUT_SAMPLE_RATE = 24_000
MAX_SPEAK_TOKENS = 256
MAX_REPETITION_WINDOW = 65_536
MAX_VOICE_SECONDS = 60


class OptionError(ValueError):
    """An option that no conversation can have; `field` names it."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"{name} {message}")
        self.field = name


class DecodeMode(Enum):
    """How tokens are chosen."""

    SAMPLING = "sampling"
    GREEDY = "greedy"


class WindowMode(Enum):
    """What becomes of a context that grows: nothing, the oldest units go, or their words stay."""

    OFF = "off"
    BASIC = "basic"
    CONTEXT = "context"


@dataclass(frozen=True)
class ConversationOptions:
    """Everything one conversation can choose. Raises `OptionError` for values outside the bounds.

    `llm_voice` (the voice the model is asked to speak with, heard as part of the prompt) and
    `tts_voice` (the voice of the vocoder) are float32 mono samples at 16 kHz. With `GREEDY`,
    every draw is replaced by the most likely id, in the talker too. `seed` None means that the
    conversation is not reproducible. The fields of the context window (see `windows`) are the
    checkpoint's own choice where they are None.
    """

    system_prompt: str = "You are a helpful assistant."
    llm_voice: FloatArray | None = None
    tts_voice: FloatArray | None = None
    generate_audio: bool = True
    seed: int | None = None
    decode_mode: DecodeMode = DecodeMode.SAMPLING
    temperature: float = 0.7
    top_k: int = 20
    top_p: float = 0.8
    text_repetition_penalty: float = 1.05
    text_repetition_window_size: int = 512
    length_penalty: float = 1.1
    listen_prob_scale: float = 1.0
    listen_top_k: int | None = None
    force_listen_count: int = 3
    max_new_speak_tokens_per_chunk: int = 20
    tts_temperature: float = 0.8
    sliding_window_mode: WindowMode | None = None
    basic_window_high_tokens: int | None = None
    basic_window_low_tokens: int | None = None
    context_max_units: int | None = None
    context_previous_max_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if value is None:
                continue
            if not (math.isfinite(value) and low <= value <= high):
                raise OptionError(name, f"is {value}, not between {low:g} and {high:g}")
        if self.listen_top_k is not None and self.listen_top_k < 0:
            raise OptionError("listen_top_k", f"is {self.listen_top_k}, less than 0")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise OptionError("seed", f"is {self.seed}, not between 0 and 2^63 - 1")
        for name, voice in (("llm_voice", self.llm_voice), ("tts_voice", self.tts_voice)):
            if voice is not None:
                check_samples(name, voice)


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0, 100),
    ("top_k", 0, 2**31),
    ("top_p", 0, 1),
    ("text_repetition_penalty", 0.01, 100),
    ("text_repetition_window_size", 0, MAX_REPETITION_WINDOW),
    ("length_penalty", 0.01, 100),
    ("listen_prob_scale", 0, 1000),
    ("force_listen_count", 0, 2**31),
    ("max_new_speak_tokens_per_chunk", 1, MAX_SPEAK_TOKENS),
    ("tts_temperature", 0, 100),
    ("basic_window_high_tokens", 1, 2**31),
    ("basic_window_low_tokens", 0, 2**31),
    ("context_max_units", 1, 2**31),
    ("context_previous_max_tokens", 0, 2**31),
)


def check_samples(name: str, samples: NDArray[Any]) -> None:
    """Raise `OptionError` unless `samples` are finite float32, at least one, at most a minute."""
    if samples.dtype != np.float32 or samples.ndim != 1:
        raise OptionError(name, f"is {samples.dtype} {samples.shape}, not one row of float32")
    if not samples.size:
        raise OptionError(name, "is empty")
    if samples.size > MAX_VOICE_SECONDS * INPUT_SAMPLE_RATE:
        raise OptionError(name, f"is longer than {MAX_VOICE_SECONDS} s")
    if not np.isfinite(samples).all():
        raise OptionError(name, "has samples that are not finite")


@dataclass(frozen=True)
class UnitInput:
    """One unit for one slot: float32 mono samples at 16 kHz, about one second of them.

    `frames` are JPEG or PNG pictures, or such as were prepared before; each is shown whole, and
    cut into at most `max_slices` slices where that is more than 1. A unit with frames may have
    no audio.
    """

    slot: int
    audio: FloatArray
    force_listen: bool = False
    frames: tuple[bytes | PreparedImage, ...] = ()
    max_slices: int = 1


@dataclass(frozen=True)
class UnitOutput:
    """What one unit led to.

    `audio` is float32 mono at 24 kHz, empty when there is none. `context_length` is the number
    of rows in the KV cache after generation, before settle. `token_ids` are all ids this unit
    will have added to the context, in order, its terminator and the unit end included.
    `text_token_count` counts the ids behind `text`, special ones included; `audio_token_count`
    the speech tokens. `input_*_count` are the rows that came in: embeddings of audio, embeddings
    of frames, and the marks around them. `stage_s` are seconds per stage of the batch that the
    unit was part of; `settle` is that of the conversation's unit before.
    """

    slot: int
    is_listen: bool
    text: str
    audio: FloatArray
    end_of_turn: bool
    context_length: int
    token_ids: tuple[int, ...]
    text_token_count: int
    audio_token_count: int
    input_audio_count: int = 0
    input_video_count: int = 0
    input_mark_count: int = 0
    stage_s: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True)
class UnitFailure:
    """A unit that led to nothing. `is_fatal` means that it may have touched the KV cache."""

    slot: int
    reason: str
    message: str
    is_fatal: bool


@dataclass(frozen=True)
class Opened:
    """A conversation that is ready for its first unit.

    `ignored` names the options that have no effect with this checkpoint. `has_window` means that
    a window makes room in the context, so that it is never full for long.
    """

    context_length: int
    ignored: tuple[str, ...] = ()
    has_window: bool = False
