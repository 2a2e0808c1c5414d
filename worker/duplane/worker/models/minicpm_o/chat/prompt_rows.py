"""The rows of a chat's prompt: encodes its pictures and sounds when their rows are needed.

So a long prompt can be fed in several steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from duplane.worker.models.minicpm_o.audio.clip import clip_rows, split_clips
from duplane.worker.models.minicpm_o.audio.whisper import AudioConfig
from duplane.worker.models.minicpm_o.chat.prompt import Bound, ChatPrompt, MessageSounds, Picture
from duplane.worker.models.minicpm_o.loader import ModelParts
from duplane.worker.models.minicpm_o.types import PreparedImage
from duplane.worker.models.types import FloatArray


class PromptRows:
    """The embeddings of a prompt and of the `closing_ids` after it, which `take` returns in order.

    `fed` is the number of rows that `take` has returned.
    """

    def __init__(
        self, parts: ModelParts, prompt: ChatPrompt, closing_ids: Sequence[int] = ()
    ) -> None:
        self._parts = parts
        self._ids = [*prompt.ids, *closing_ids]
        self.fed = 0
        encoded: dict[int, EncodedSounds] = {}
        for group in prompt.sound_groups:
            batches = Sounds(parts, is_blockwise=prompt.is_blockwise)
            encoded |= {id(sounds): batches.message(sounds) for sounds in group}
        self._media = [
            Medium(partial(_encode_image, parts, medium.image), medium.bounds)
            if isinstance(medium, Picture)
            else encoded[id(medium)].medium
            for medium in prompt.media
        ]

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def is_fed(self) -> bool:
        """Whether `take` has returned all rows."""
        return self.fed == len(self._ids)

    def unencoded_sounds(self, count: int) -> EncodedSounds | None:
        """Return the sounds that must be encoded before the next `count` rows are taken, if any."""
        for medium in self._media:
            sounds, start = medium.sounds, medium.bounds[0][0]
            if sounds is not None and start < self.fed + count and not sounds.is_encoded:
                return sounds
        return None

    def take(self, count: int) -> Tensor:
        """Return the next embeddings [rows, hidden], at most `count`. Encode media among them."""
        start, stop = self.fed, min(self.fed + count, len(self._ids))
        rows = self._parts.llm.embed(self._ids[start:stop])
        for medium in self._media:
            if medium.bounds[0][0] < stop:
                medium.write_into(rows, start)
        self._media = [medium for medium in self._media if medium.bounds[-1][1] > stop]
        self.fed = stop
        return rows


@dataclass
class Medium:
    """A picture, or the `sounds` of one message.

    `bounds` are the ranges of rows that its embeddings fill in the prompt, each as (first row, row
    after the last). `encode` returns the embeddings for all these rows as one tensor.
    """

    encode: Callable[[], Tensor]
    bounds: Sequence[Bound]
    sounds: EncodedSounds | None = None
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


class Sounds:
    """The sounds of several messages, encoded batch by batch. Sounds of one message are joined.

    With `is_blockwise` each block of a sound attends only to itself and earlier blocks. Otherwise
    each block attends to the whole sound.
    """

    def __init__(self, parts: ModelParts, *, is_blockwise: bool) -> None:
        self._audio, self._is_blockwise = parts.audio, is_blockwise
        self._messages: list[EncodedSounds] = []
        self._batches = self._encode()

    def message(self, sounds: MessageSounds) -> EncodedSounds:
        """Add the sounds of a message."""
        self._messages.append(EncodedSounds(sounds, self._batches))
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


class EncodedSounds:
    """The sounds of one message. `embeds` [rows, hidden] are the embeddings so far, in order."""

    def __init__(self, sounds: MessageSounds, batches: Iterator[None]) -> None:
        self._clips, self._bounds = sounds.clips, sounds.bounds
        self._batches = batches
        self.embeds: list[Tensor] = []
        self.medium = Medium(self._encode, self._bounds, self)

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
    if parts.vision is None:
        raise ValueError("the model refuses pictures")
    return parts.vision.encode([image])[0].flatten(0, 1)
