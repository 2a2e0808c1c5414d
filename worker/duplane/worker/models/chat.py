"""The requests and results of chats, as plain values: numpy only, no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from duplane.worker.models.types import DecodeMode, FloatArray, Frame, OptionError, Output

MAX_CHAT_TOKENS = 32_768


class ChatRole(Enum):
    """The role of a message. The values are the chat template's names."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"


@dataclass(frozen=True)
class ChatImage:
    """A picture: a JPEG or PNG, or its prepared form."""

    encoded: Frame


@dataclass(frozen=True)
class ChatAudio:
    """Float32 mono samples at the model's input rate."""

    samples: FloatArray


@dataclass(frozen=True)
class ChatVideo:
    """A video as a sequence of pictures and of the sounds between them."""

    pieces: tuple[ChatImage | ChatAudio, ...]


ChatPart = str | ChatImage | ChatAudio | ChatVideo


@dataclass(frozen=True)
class ChatMessage:
    """One message: its parts in order."""

    role: ChatRole
    parts: tuple[ChatPart, ...]


@dataclass(frozen=True)
class ChatOptions:
    """The options of an answer. Raises `OptionError` for values outside the bounds.

    - `top_k` 0 and `top_p` 1 switch these filters off.
    - `use_tts_template`: the prompt asks for wording as in speech. None means the value of
      `generate_audio`.
    - `max_slices`: into how many slices a picture may be cut. None means the checkpoint's value.
    - `use_image_id`: pictures are numbered. None means the checkpoint's value.
    - `is_omni`: the parts of a message are joined without line breaks.
    """

    max_new_tokens: int = 512
    decode_mode: DecodeMode = DecodeMode.SAMPLING
    temperature: float = 0.7
    top_k: int = 100
    top_p: float = 0.8
    repetition_penalty: float = 1.02
    length_penalty: float = 1.1
    is_thinking: bool = False
    generate_audio: bool = False
    tts_voice: FloatArray | None = None
    tts_temperature: float = 0.8
    use_tts_template: bool | None = None
    max_slices: int | None = None
    use_image_id: bool | None = None
    is_omni: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if not (math.isfinite(value) and low <= value <= high):
                raise OptionError(name, f"is {value}, not between {low:g} and {high:g}")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise OptionError("seed", f"is {self.seed}, not between 0 and 2^63 - 1")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely id is always chosen, without draws."""
        return self.decode_mode is DecodeMode.GREEDY

    @property
    def answers_as_speech(self) -> bool:
        """Whether the prompt asks for an answer that is worded as speech."""
        return self.generate_audio if self.use_tts_template is None else self.use_tts_template


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("max_new_tokens", 1, MAX_CHAT_TOKENS),
    ("temperature", 0, 100),
    ("top_k", 0, 2**31),
    ("top_p", 0, 1),
    ("repetition_penalty", 0.01, 100),
    ("length_penalty", 0.01, 100),
    ("tts_temperature", 0, 100),
)


@dataclass(frozen=True)
class ChatRequest:
    """The whole history, oldest first, and the options of the answer."""

    messages: tuple[ChatMessage, ...]
    options: ChatOptions = ChatOptions()


class Finish(Enum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"
    CONTEXT_FULL = "context full"


@dataclass(frozen=True, kw_only=True)
class ChatOutput(Output):
    """The result of one step of one chat.

    `token_ids` are the ids of the answer that this step added to the context. `is_prefilled` is
    true once the whole prompt is in the context. `finish` is set in the last output.
    """

    is_prefilled: bool = True
    finish: Finish | None = None
