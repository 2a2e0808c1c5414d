"""The inputs and outputs of every model as plain values: numpy only, no torch.

`duplane.worker.models.interface` describes how the worker uses them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]

MAX_SPEAK_TOKENS = 256
MAX_SPEECH_REQUESTS = 8
"""Maximum number of unfinished requests to speak of a conversation."""
MAX_REPETITION_WINDOW = 65_536
MAX_VOICE_SAMPLES = 960_000
"""Maximum number of samples of a voice: a minute at 16 kHz."""


class PreparedPicture(Protocol):
    """A picture in the form that a model reads, as plain data. Only its family reads its content.

    A picture has one piece, and one more piece for each slice of it.
    """

    @property
    def piece_count(self) -> int: ...


Frame = bytes | PreparedPicture
"""An encoded picture, or one that was prepared before its unit or chat runs."""


class ImageError(ValueError):
    """An image that the model cannot use. The message has the reason."""


class OptionError(ValueError):
    """An option of a conversation is invalid. `field` names it."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"{name} {message}")
        self.field = name


class DecodeMode(Enum):
    """The way in which tokens are chosen."""

    SAMPLING = "sampling"
    GREEDY = "greedy"


class WindowMode(Enum):
    """How a long context is shortened: not at all, by dropping old units, or by keeping only their
    text.
    """

    OFF = "off"
    BASIC = "basic"
    CONTEXT = "context"


@dataclass(frozen=True)
class ConversationOptions:
    """The options of one conversation. Raises `OptionError` for values outside the bounds.

    `llm_voice` (the voice in the prompt, which the model is asked to imitate) and `tts_voice` (the
    voice to speak with) are float32 mono samples at the model's input rate. `GREEDY` means that the
    most likely id is always chosen, in the speech too. Without a `seed` the conversation is not
    reproducible. If a field of the context window is None, the checkpoint's value applies. A model
    ignores the options that it does not have, and names them in `Opened.ignored`.
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

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely id is always chosen, without draws."""
        return self.decode_mode is DecodeMode.GREEDY

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
    """Raise `OptionError` unless `samples` are finite float32, not empty, and not too many."""
    if samples.dtype != np.float32 or samples.ndim != 1:
        raise OptionError(name, f"is {samples.dtype} {samples.shape}, not one row of float32")
    if not samples.size:
        raise OptionError(name, "is empty")
    if samples.size > MAX_VOICE_SAMPLES:
        raise OptionError(name, f"has more than {MAX_VOICE_SAMPLES:,} samples")
    if not np.isfinite(samples).all():
        raise OptionError(name, "has samples that are not finite")


@dataclass(frozen=True, slots=True)
class SpeechRequest:
    """A text that the model must speak as a turn of its own. `number` is the client's name of it.

    `Preparer.unit` sets `ids`, the text in the model's own form.
    """

    number: int
    text: str
    ids: tuple[int, ...] = ()


class SpeechOutcome(Enum):
    """What became of a requested text."""

    SPOKEN = "spoken"
    INTERRUPTED = "interrupted"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class SpeechResult:
    """The end of a request. For a refused one, `field` is the name of the field of `Unit`."""

    number: int
    outcome: SpeechOutcome
    reason: str = ""
    message: str = ""
    field: str = ""


INVALID_FIELD, UNSUPPORTED, TOO_MANY_REQUESTS = "INVALID_FIELD", "UNSUPPORTED", "TOO_MANY_REQUESTS"


def refused_speech(number: int, reason: str, fault: str, field: str) -> SpeechResult:
    """Return the result of a request that is refused. `field` is the path of the field at fault."""
    return SpeechResult(number, SpeechOutcome.REFUSED, reason, f"{field} {fault}", field)


def too_many(number: int) -> SpeechResult:
    """Return the result of a request that is refused because too many others are unfinished."""
    fault = f"are too many: {MAX_SPEECH_REQUESTS} of them are unfinished"
    return refused_speech(number, TOO_MANY_REQUESTS, fault, "speech_requests")


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """The input of one unit of one conversation.

    `audio` is float32 mono at the model's input rate, finite, about as long as the model's unit.
    `frames` are encoded pictures, or pictures that `Preparer.unit` has prepared. The model gets
    each whole frame and, if `max_slices` is more than 1, also at most `max_slices` slices of it. A
    unit with frames may have no audio. `sequence` is the client's number of the unit; failures name
    it. `rows` is the number of rows of the model's input, which `Preparer.unit` sets.

    `speech` are new requests to speak. `force_listen` ends the requests of earlier units, and those
    of this unit begin later. `speech_results` are requests that have ended before this unit.
    """

    slot: int
    audio: FloatArray
    force_listen: bool = False
    frames: tuple[Frame, ...] = ()
    max_slices: int = 1
    sequence: int = 0
    rows: int = 0
    speech: tuple[SpeechRequest, ...] = ()
    speech_results: tuple[SpeechResult, ...] = ()


@dataclass(frozen=True)
class StateChange:
    """How a unit changed the state of its conversation. Only MiniCPM-o has it.

    The bytes of `UnitOutput.state` have the same content. Workers of release 0.1 do not know these
    bytes; they exchange the fields as a message of the contract.

    `chosen_token_ids` are the ids that the model chose and that the repetition penalty counts. The
    rules of a unit can replace or drop some of these ids. `draw_count` is the number of uniform
    numbers that text and speech used. `interrupted_turn` means that a forced listen has ended the
    turn.

    That release knows no requests to speak. `ended_requests` means that a forced listen has ended
    all earlier ones; `requests` are new ones, each with its number and its ids; `was_requested`
    means that the unit spoke ids of the oldest one. It knows no `row_limit` either: the number of
    rows to which a context window made room before the unit because memory was short; else 0.
    """

    speech_token_ids: tuple[int, ...] = ()
    chosen_token_ids: tuple[int, ...] = ()
    draw_count: int = 0
    interrupted_turn: bool = False
    was_requested: bool = False
    ended_requests: bool = False
    requests: tuple[tuple[int, tuple[int, ...]], ...] = ()
    row_limit: int = 0


@dataclass(frozen=True)
class PastUnit:
    """A unit that was run before, perhaps by another worker, with parts of its `UnitOutput`.

    `unit.force_listen` has no effect, because the ids show whether the model listened. `change` has
    an effect only if `state` is empty, because a worker of release 0.1 ran the unit.

    If `unfed_rows` is not 0, the model does not feed the unit to the context, to which it added
    this number of rows, and only follows what the unit changed besides. The unit then has no
    pictures. If it has sound, the model hears it for the sake of later units; `had_audio` tells
    whether the unit had sound when it ran. All such units come before the units that are fed.
    """

    unit: Unit
    token_ids: tuple[int, ...]
    state: bytes
    context_length: int
    change: StateChange | None = None
    unfed_rows: int = 0
    had_audio: bool = True

    @property
    def row_count(self) -> int:
        """The number of rows of the unit that the model feeds."""
        return 0 if self.unfed_rows else self.unit.rows + len(self.token_ids)


@dataclass(frozen=True)
class UnitReach:
    """How many units before one unit a later rebuild of the conversation depends on.

    - `row_count`: the number of rows that the unit added to the context.
    - `context_units`: the number of units in the context when the unit ran, including the unit.
    - `sound_units`: if a rebuild feeds no unit before this one, it must hear the sound of this
      number of units before it.
    - `turn_units`: the number of units, including this one, since the oldest one on which the
      speech of the next unit depends beside the context; 0 if there is none.
    """

    row_count: int
    context_units: int
    sound_units: int
    turn_units: int


_NO_AUDIO = np.zeros(0, np.float32)


@dataclass(frozen=True)
class Output:
    """The output of one unit of a conversation, or of one step of a chat. Any part may be empty.

    `context_length` is the number of rows in the KV cache. `audio` is float32 mono at the model's
    output rate, made from `audio_token_count` speech tokens. `token_ids` are the ids that were
    added to the context, in order. `stage_s` has the seconds of each stage of the batch.
    """

    slot: int
    context_length: int
    text: str = ""
    audio: FloatArray = field(default_factory=lambda: _NO_AUDIO)
    token_ids: tuple[int, ...] = ()
    audio_token_count: int = 0
    stage_s: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, kw_only=True)
class UnitOutput(Output):
    """The result of one unit that was run.

    - `context_length` is the length after generation, before settle.
    - `token_ids` include the unit's terminator and the unit end.
    - `stage_s`: the entry `settle` is the time that it took to settle the conversation's previous
      unit.
    - `end_of_turn`: the model has finished its turn. `interrupted_turn`: the model has listened
      before the speech of its turn was complete, mostly because the unit had to listen.
    - `is_forced`: the unit had to listen, so the model did not decide.
    - `listen_probability`: the probability, with all options of the conversation, that the first
      draw of the unit chooses to listen. None if nothing was drawn. In an open turn such a draw
      continues the turn.
    - `text_token_count`: the number of ids from which `text` is decoded, including special ids.
    - `input_*_count`: the numbers of input rows: embeddings of audio and of frames, and marks.
    - `state`: what the family needs, beside the unit and `token_ids`, to rebuild the conversation.
      Only the family reads it. Empty if the model cannot rebuild conversations.
    - `change`: the same for workers of release 0.1; None if that release does not run the family.
    - `speech_request`: the number of the request whose text the unit spoke; None if the model has
      decided by itself. `speech_results`: the requests that ended with this unit or were refused.
    - `reach`: which earlier units a rebuild needs; None if it needs all of them.
    """

    is_listen: bool
    end_of_turn: bool
    text_token_count: int
    input_audio_count: int = 0
    input_video_count: int = 0
    input_mark_count: int = 0
    interrupted_turn: bool = False
    is_forced: bool = False
    listen_probability: float | None = None
    state: bytes = b""
    change: StateChange | None = None
    speech_request: int | None = None
    speech_results: tuple[SpeechResult, ...] = ()
    reach: UnitReach | None = None


@dataclass(frozen=True)
class UnitFailure:
    """The failure of a slot's work, mostly of a unit. `is_fatal`: the conversation cannot continue.

    If a field of the unit is invalid, `field` names it, for example `frames[1]`. A rebuild fails
    with the reason `REBUILD_REFUSED` or `REBUILD_DIFFERS` if its past units are at fault.
    """

    slot: int
    reason: str
    message: str
    is_fatal: bool
    field: str = ""


@dataclass(frozen=True)
class Rebuilt:
    """The result of a share of a rebuild, which takes some of the given past units.

    `unit_count` is the number of units that were taken, from the first one on. `context_length` is
    the length of the context after the last of these units, as in its `UnitOutput`. If
    `is_complete`, all units were taken, and the conversation is as if it had run them. `lack` says
    what else the conversation needs before a unit can run: units that were not fed are still in the
    context, or the sound began too late. Empty if nothing is missing.
    """

    slot: int
    unit_count: int
    context_length: int
    is_complete: bool
    lack: str = ""
    stage_s: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True)
class Opened:
    """A conversation that is ready for its first unit.

    `ignored` names the options that have no effect with this checkpoint. `has_window` means that
    a window drops old units when the context is full.
    """

    slot: int
    context_length: int
    ignored: tuple[str, ...] = ()
    has_window: bool = False
