"""The prompt of a chat as plain data: its ids, and the pictures and sounds in it.

Pictures and sounds are checked and cut when the prompt is laid out; `prompt_rows` encodes them when
their rows are needed. As in the reference, names of special tokens in a text become those tokens;
text that looks like a placeholder of a picture stays text.
Source: `MiniCPMO.chat` in `MiniCPMO45/modeling_minicpmo_unified.py` of
OpenBMB/MiniCPM-o-Demo@28b60cf.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from duplane.worker.models.chat import (
    ChatAudio,
    ChatImage,
    ChatMessage,
    ChatOptions,
    ChatPart,
    ChatVideo,
)
from duplane.worker.models.minicpm_o.audio.clip import clip_rows
from duplane.worker.models.minicpm_o.llm.tokenizer import CHARACTERS_PER_ROW, Tokens
from duplane.worker.models.minicpm_o.preparer_parts import PromptParts
from duplane.worker.models.minicpm_o.types import PreparedImage
from duplane.worker.models.minicpm_o.vision.layout import Layout, chat_layout
from duplane.worker.models.minicpm_o.vocoder.types import VocoderVoice
from duplane.worker.models.types import FloatArray, ImageError, OptionError

AUDIO_START, AUDIO_END = "<|audio_start|>", "<|audio_end|>"
IMAGE_PLACE, AUDIO_PLACE = "<image>./</image>", "<audio>./</audio>"
ANSWER_MARK = "<|im_end|>\n<|im_start|>assistant\n"
NO_THOUGHTS = "<think>\n\n</think>\n\n"
SPEECH_MARK = "<|tts_bos|>"
_PRIVATE_USE = range(0xE000, 0xF900)

Bound = tuple[int, int]
Check = Callable[[], None]
"""A function that long work calls between its steps; it raises an exception to stop the work."""


def go_on() -> None:
    """Never stop the work."""


@dataclass(frozen=True)
class Picture:
    """A picture. `bounds` are the ranges of rows of its embeddings: first row, row after the last.

    The embeddings of its tiles fill these ranges one after the other.
    """

    image: PreparedImage
    bounds: list[Bound]


@dataclass(frozen=True)
class MessageSounds:
    """The sounds of one message, and the range of rows of each."""

    clips: list[FloatArray] = field(default_factory=list[FloatArray])
    bounds: list[Bound] = field(default_factory=list[Bound])


@dataclass
class ChatPrompt:
    """The ids of a prompt, with the unknown token at the rows of media embeddings.

    `text` is the rendered prompt with a placeholder for every medium. The bounds are the ranges of
    rows of embeddings. `media` are in the order of their first rows. The sounds of one entry of
    `sound_groups` are encoded together. With `is_blockwise` each block of a sound attends only to
    itself and earlier blocks; otherwise each block attends to the whole sound.
    """

    text: str = ""
    ids: list[int] = field(default_factory=list[int])
    image_bounds: list[Bound] = field(default_factory=list[Bound])
    audio_bounds: list[Bound] = field(default_factory=list[Bound])
    media: list[Picture | MessageSounds] = field(default_factory=list[Picture | MessageSounds])
    sound_groups: list[list[MessageSounds]] = field(default_factory=list[list[MessageSounds]])
    is_blockwise: bool = True


@dataclass(frozen=True)
class PreparedChat:
    """A request that can be answered, with its prompt of `prompt_rows` rows.

    `image_rows` of these rows are embeddings of pictures, `audio_rows` of sounds. The mark that
    begins the answer is not counted. `voice` is the voice of the answer.
    """

    options: ChatOptions
    prompt: ChatPrompt
    prompt_rows: int
    image_rows: int
    audio_rows: int
    voice: VocoderVoice | None
    uses_tts_voice: bool = False


def answer_mark(tokens: Tokens, options: ChatOptions) -> list[int]:
    """Return the ids between a prompt and the answer."""
    thoughts = "" if options.is_thinking else NO_THOUGHTS
    speech = SPEECH_MARK if options.answers_as_speech else ""
    return tokens.encode(ANSWER_MARK + thoughts + speech)


def prompt_room(tokens: Tokens, options: ChatOptions, capacity: int) -> int:
    """Return the largest number of rows of a prompt after which at least one id fits."""
    return capacity - len(answer_mark(tokens, options)) - 1


class PromptBuilder:
    """Builds a prompt part by part. Raises `OptionError` that names the invalid field."""

    def __init__(
        self,
        parts: PromptParts,
        options: ChatOptions,
        room: int,
        *,
        is_blockwise: bool = True,
        check: Check = go_on,
    ) -> None:
        """Limit the prompt to `room` rows. `check` is called before every picture and sound.

        `is_blockwise` limits the attention within sounds; see `ChatPrompt`.
        """
        self._parts, self._options, self._room = parts, options, room
        self._check = check
        self._image_count = 0
        self.prompt = ChatPrompt(is_blockwise=is_blockwise)

    def chat(self, messages: Sequence[ChatMessage]) -> ChatPrompt:
        """Build the prompt of a whole history, rendered by the checkpoint's template."""
        tokens = self._parts.tokens
        if not tokens.has_chat_template:
            raise OptionError("messages", "cannot be rendered: the checkpoint has no chat template")
        if not messages:
            raise OptionError("messages", "is empty")
        mark = _unused_character(messages)
        turns: list[tuple[str, str]] = []
        places: list[tuple[int, int]] = []
        for index, message in enumerate(messages):
            if not message.parts:
                raise OptionError(f"messages[{index}].parts", "is empty")
            pieces: list[str] = []
            for number, part in enumerate(message.parts):
                if isinstance(part, str):
                    pieces.append(part)
                    continue
                pieces.append(f"{mark}{len(places)}{mark}")
                places.append((index, number))
            turns.append((message.role.value, self._joint.join(pieces)))
        try:
            rendered = tokens.render(turns, is_thinking=self._options.is_thinking)
        except ValueError as error:
            raise OptionError("messages", f"are refused by the chat template: {error}") from error
        return self._fill(re.split(f"{mark}([0-9]+){mark}", rendered), messages, places)

    def _fill(
        self, pieces: list[str], messages: Sequence[ChatMessage], places: list[tuple[int, int]]
    ) -> ChatPrompt:
        """Add `pieces`, where texts and indices alternate. An index names a medium in `places`."""
        sounds = [MessageSounds() for _ in messages]
        self.prompt.sound_groups.append(sounds)
        for position, piece in enumerate(pieces):
            if position % 2 == 0:
                self.add_text(piece)
                continue
            index, number = places[int(piece)]
            name = f"messages[{index}].parts[{number}]"
            self._add_part(messages[index].parts[number], name, sounds[index])
        return self.prompt

    def add_text(self, text: str) -> None:
        """Add text."""
        self.prompt.text += text
        self._add_text(text)

    def message(self, parts: Sequence[ChatPart], name: str) -> None:
        """Add the parts of one message, without a template. Errors name part i as `name[i]`."""
        sounds = MessageSounds()
        self.prompt.sound_groups.append([sounds])
        for number, part in enumerate(parts):
            if number:
                self.add_text(self._joint)
            self._add_part(part, f"{name}[{number}]", sounds)

    @property
    def _joint(self) -> str:
        return "" if self._options.is_omni else "\n"

    def _add_part(self, part: ChatPart, name: str, sounds: MessageSounds) -> None:
        self._check()
        match part:
            case str():
                self.add_text(part)
            case ChatImage():
                self.prompt.text += IMAGE_PLACE
                self._add_image(part, f"{name}.image")
            case ChatAudio():
                self.prompt.text += AUDIO_PLACE
                self._add_audio(part.samples, f"{name}.audio", sounds)
            case ChatVideo():
                for position, piece in enumerate(part.pieces):
                    if position:
                        self.add_text(self._joint)
                    self._add_part(piece, name, sounds)

    def _add_text(self, text: str) -> None:
        room = self._room - len(self.prompt.ids)
        if len(text) > CHARACTERS_PER_ROW * max(room, 0):
            raise OptionError("messages", f"have more than {self._room} tokens")
        self._add(self._parts.tokens.encode(text))

    def _add(self, ids: Iterable[int]) -> None:
        self.prompt.ids += ids
        if len(self.prompt.ids) > self._room:
            raise OptionError("messages", f"have more than {self._room} tokens")

    def _add_placeholders(self, count: int) -> Bound:
        start = len(self.prompt.ids)
        self._add([self._parts.tokens.unknown] * count)
        return start, start + count

    def _add_image(self, image: ChatImage, name: str) -> None:
        pictures, options = self._parts.pictures, self._options
        if pictures is None:
            raise OptionError(name, "is a picture, but this checkpoint has no vision encoder")
        prepared = image.encoded
        if isinstance(prepared, bytes):
            try:
                prepared = pictures.prepare(prepared, options.max_slices)
            except ImageError as error:
                raise OptionError(name, f"cannot be used: {error}") from error
        if not isinstance(prepared, PreparedImage):
            raise TypeError(f"{name} was prepared for another family of models")
        is_numbered = (
            pictures.marks.has_id if options.use_image_id is None else options.use_image_id
        )
        number = self._image_count if is_numbered else None
        self._image_count += 1
        layout = chat_layout(pictures.marks, prepared.grid, number)
        bounds = self._lay_out(layout, pictures.rows)
        self.prompt.image_bounds += bounds
        self.prompt.media.append(Picture(prepared, bounds))

    def _lay_out(self, layout: Layout, rows: int) -> list[Bound]:
        bounds: list[Bound] = []
        for piece in layout:
            if isinstance(piece, str):
                self._add_text(piece)
            else:
                bounds.append(self._add_placeholders(rows))
        return bounds

    def _add_audio(self, samples: FloatArray, name: str, sounds: MessageSounds) -> None:
        if samples.dtype != np.float32 or samples.ndim != 1 or not np.isfinite(samples).all():
            raise OptionError(name, "is not one row of finite float32 samples")
        self._add_text(AUDIO_START)
        rows = clip_rows(self._parts.audio, len(samples))
        bound = self._add_placeholders(rows)
        self._add_text(AUDIO_END)
        self.prompt.audio_bounds.append(bound)
        if rows:
            if not sounds.clips:
                self.prompt.media.append(sounds)
            sounds.clips.append(samples)
            sounds.bounds.append(bound)


def row_count(bounds: Sequence[Bound]) -> int:
    """Return the number of rows in these ranges."""
    return sum(stop - start for start, stop in bounds)


def _unused_character(messages: Sequence[ChatMessage]) -> str:
    """Return a character that no message contains, to mark the positions of media."""
    texts = [part for message in messages for part in message.parts if isinstance(part, str)]
    used = set("".join(texts))
    for code in _PRIVATE_USE:
        if chr(code) not in used:
            return chr(code)
    raise OptionError("messages", "use all private-use characters of Unicode")
