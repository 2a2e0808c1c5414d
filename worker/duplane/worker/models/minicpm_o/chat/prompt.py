"""The prompt of a chat: its ids, its embeddings, and the bounds of pictures and sounds in it.

Pictures and sounds are checked and cut when the prompt is built. They are encoded only when their
rows are needed, so that a long prompt can be fed in several steps. As in the reference, names of
special tokens in a text become those tokens; text that looks like a placeholder of a picture stays
text.
Source: `MiniCPMO.chat` in `MiniCPMO45/modeling_minicpmo_unified.py` of
OpenBMB/MiniCPM-o-Demo@28b60cf.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from duplane.worker.models.minicpm_o.audio.clip import clip_rows, split_clips
from duplane.worker.models.minicpm_o.audio.whisper import AudioConfig
from duplane.worker.models.minicpm_o.chat.types import (
    ChatAudio,
    ChatImage,
    ChatMessage,
    ChatOptions,
    ChatPart,
    ChatVideo,
)
from duplane.worker.models.minicpm_o.llm.tokenizer import CHARACTERS_PER_ROW
from duplane.worker.models.minicpm_o.loader import ModelParts
from duplane.worker.models.minicpm_o.types import FloatArray, ImageError, OptionError, PreparedImage
from duplane.worker.models.minicpm_o.vision.layout import Layout, chat_layout

AUDIO_START, AUDIO_END = "<|audio_start|>", "<|audio_end|>"
IMAGE_PLACE, AUDIO_PLACE = "<image>./</image>", "<audio>./</audio>"
_PRIVATE_USE = range(0xE000, 0xF900)

Bound = tuple[int, int]
Check = Callable[[], None]
"""A function that long work calls between its steps; it raises an exception to stop the work."""


def go_on() -> None:
    """Never stop the work."""


@dataclass
class Medium:
    """A picture, or the `sounds` of one message.

    `bounds` are the ranges of rows that its embeddings fill in the prompt, each as (first row, row
    after the last). `encode` returns the embeddings for all these rows as one tensor.
    """

    encode: Callable[[], Tensor]
    bounds: list[Bound]
    sounds: MessageSounds | None = None
    embeds: Tensor | None = None

    def write_into(self, rows: Tensor, start: int) -> None:
        """Write the embeddings into `rows`, which are the prompt's rows from row `start` on."""
        if self.embeds is None:
            self.embeds = self.encode().to(rows.dtype)
        stop, before = start + len(rows), 0
        for first, last in self.bounds:
            low, high = max(first, start), min(last, stop)
            if low < high:
                offset = before - first
                rows[low - start : high - start] = self.embeds[low + offset : high + offset]
            before += last - first


@dataclass
class ChatPrompt:
    """The ids of a prompt, with the unknown token at the rows of media embeddings.

    `text` is the rendered prompt with a placeholder for every medium. `fed` is the number of rows
    that `take` has returned.
    """

    text: str = ""
    ids: list[int] = field(default_factory=list[int])
    media: list[Medium] = field(default_factory=list[Medium])
    image_bounds: list[Bound] = field(default_factory=list[Bound])
    audio_bounds: list[Bound] = field(default_factory=list[Bound])
    fed: int = 0

    @property
    def is_fed(self) -> bool:
        """Whether `take` has returned all rows."""
        return self.fed == len(self.ids)

    def unencoded_sounds(self, count: int) -> MessageSounds | None:
        """Return the sounds that must be encoded before the next `count` rows are taken, if any."""
        for medium in self.media:
            sounds, start = medium.sounds, medium.bounds[0][0]
            if sounds is not None and start < self.fed + count and not sounds.is_encoded:
                return sounds
        return None

    def take(self, parts: ModelParts, count: int) -> Tensor:
        """Return the next embeddings [rows, hidden], at most `count`. Encode media among them."""
        start, stop = self.fed, min(self.fed + count, len(self.ids))
        rows = parts.llm.embed(self.ids[start:stop])
        for medium in self.media:
            if medium.bounds[0][0] < stop:
                medium.write_into(rows, start)
        self.media = [medium for medium in self.media if medium.bounds[-1][1] > stop]
        self.fed = stop
        return rows


class PromptBuilder:
    """Builds a prompt part by part. Raises `OptionError` that names the invalid field."""

    def __init__(
        self,
        parts: ModelParts,
        options: ChatOptions,
        room: int,
        *,
        is_blockwise: bool = True,
        check: Check = go_on,
    ) -> None:
        """Limit the prompt to `room` rows. `check` is called before every picture and sound.

        `is_blockwise` limits the attention within sounds; see `Sounds`.
        """
        self._parts, self._options, self._room = parts, options, room
        self._is_blockwise, self._check = is_blockwise, check
        self._image_count = 0
        self.prompt = ChatPrompt()

    def chat(self, messages: Sequence[ChatMessage]) -> ChatPrompt:
        """Build the prompt of a whole history, rendered by the checkpoint's template."""
        template = self._parts.chat_template
        if template is None:
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
            rendered = template.render(turns, is_thinking=self._options.is_thinking)
        except ValueError as error:
            raise OptionError("messages", f"are refused by the chat template: {error}") from error
        return self._fill(re.split(f"{mark}([0-9]+){mark}", rendered), messages, places)

    def _fill(
        self, pieces: list[str], messages: Sequence[ChatMessage], places: list[tuple[int, int]]
    ) -> ChatPrompt:
        """Add `pieces`, where texts and indices alternate. An index names a medium in `places`."""
        all_sounds = Sounds(self._parts, is_blockwise=self._is_blockwise)
        sounds = [all_sounds.message() for _ in messages]
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
        sounds = Sounds(self._parts, is_blockwise=self._is_blockwise).message()
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
        vision, options = self._parts.vision, self._options
        if vision is None:
            raise OptionError(name, "is a picture, but this checkpoint has no vision encoder")
        prepared = image.encoded
        if isinstance(prepared, bytes):
            try:
                prepared = vision.prepare(prepared, options.max_slices)
            except ImageError as error:
                raise OptionError(name, f"cannot be used: {error}") from error
        is_numbered = vision.marks.has_id if options.use_image_id is None else options.use_image_id
        number = self._image_count if is_numbered else None
        self._image_count += 1
        bounds = self._lay_out(chat_layout(vision.marks, prepared.grid, number), vision.rows)
        encode = partial(_encode_image, self._parts, prepared)
        self.prompt.image_bounds += bounds
        self.prompt.media.append(Medium(encode, bounds))

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
        rows = clip_rows(self._parts.audio.config, len(samples))
        bound = self._add_placeholders(rows)
        self._add_text(AUDIO_END)
        self.prompt.audio_bounds.append(bound)
        if rows and sounds.add(samples, bound):
            self.prompt.media.append(sounds.medium)


class Sounds:
    """The sounds of several messages, encoded batch by batch. Sounds of one message are joined.

    With `is_blockwise` each block of a sound attends only to itself and earlier blocks. Otherwise
    each block attends to the whole sound.
    """

    def __init__(self, parts: ModelParts, *, is_blockwise: bool) -> None:
        self._audio, self._is_blockwise = parts.audio, is_blockwise
        self._messages: list[MessageSounds] = []
        self._batches = self._encode()

    def message(self) -> MessageSounds:
        """Begin a message."""
        self._messages.append(MessageSounds(self._batches))
        return self._messages[-1]

    def _encode(self) -> Iterator[None]:
        """Encode one batch at each call of `next`. The batches depend only on these messages."""
        config = self._audio.config
        clips = [(message, clip) for message in self._messages for clip in message.clips(config)]
        groups = split_clips(config, [clip for _, clip in clips], is_blockwise=self._is_blockwise)
        pieces = [piece for group in groups for piece in group]
        owners = iter(
            [message for (message, _), group in zip(clips, groups, strict=True) for _ in group]
        )
        for batch in self._audio.batches(pieces):
            for rows in self._audio.encode_segments(batch, is_blockwise=self._is_blockwise):
                next(owners).embeds.append(rows)
            yield


class MessageSounds:
    """The sounds of one message. `embeds` [rows, hidden] are the embeddings so far, in order."""

    def __init__(self, batches: Iterator[None]) -> None:
        self._clips: list[FloatArray] = []
        self._bounds: list[Bound] = []
        self._batches = batches
        self.embeds: list[Tensor] = []
        self.medium = Medium(self._encode, self._bounds, self)

    def add(self, samples: FloatArray, bound: Bound) -> bool:
        """Add a clip whose embeddings go to `bound`. Return True for the message's first clip."""
        self._clips.append(samples)
        self._bounds.append(bound)
        return len(self._bounds) == 1

    def clips(self, config: AudioConfig) -> list[FloatArray]:
        """Return the clips, joined to one clip unless that would give too few embeddings."""
        if not self._clips:
            return []
        joined = np.concatenate(self._clips)
        return [joined] if clip_rows(config, len(joined)) >= self._count else self._clips

    @property
    def _count(self) -> int:
        return sum(stop - start for start, stop in self._bounds)

    @property
    def is_encoded(self) -> bool:
        """Whether all sounds of the message are encoded."""
        return sum(map(len, self.embeds)) >= self._count

    def encode_next(self) -> None:
        """Encode the next batch of sounds of the whole prompt."""
        next(self._batches)

    def _encode(self) -> Tensor:
        while not self.is_encoded:
            self.encode_next()
        return torch.cat(self.embeds)


def _encode_image(parts: ModelParts, image: PreparedImage) -> Tensor:
    assert parts.vision, "it prepared the picture"
    return parts.vision.encode([image])[0].flatten(0, 1)


def _unused_character(messages: Sequence[ChatMessage]) -> str:
    """Return a character that no message contains, to mark the positions of media."""
    texts = [part for message in messages for part in message.parts if isinstance(part, str)]
    used = set("".join(texts))
    for code in _PRIVATE_USE:
        if chr(code) not in used:
            return chr(code)
    raise OptionError("messages", "use all private-use characters of Unicode")
