"""The rows of a chat's prompt: encodes its pictures and sounds when their rows are needed.

So a long prompt can be fed in several launches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from duplane.worker.models.interface import Part
from duplane.worker.models.minicpm_o.audio.clip import clip_rows, split_clips
from duplane.worker.models.minicpm_o.audio.whisper import AudioConfig
from duplane.worker.models.minicpm_o.chat.prompt import Bound, ChatPrompt, MessageSounds, Picture
from duplane.worker.models.minicpm_o.loader import ModelParts
from duplane.worker.models.minicpm_o.vision.seen_tiles import SeenTiles
from duplane.worker.models.types import FloatArray

SEEN_ROWS = 512
"""The pictures that begin within this number of rows may be encoded together."""


class PromptRows:
    """The embeddings of a prompt and of the `closing_ids` after it, which `take` returns in order.

    The pictures among the next rows are encoded together before these rows are taken, and so is a
    batch of sounds. `seen` has the tiles of all pictures. `fed` is the number of rows that `take`
    has returned.
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
        images = [medium.image for medium in prompt.media if isinstance(medium, Picture)]
        self.seen = SeenTiles(images)
        stops = accumulate(len(image.tiles) for image in images)
        self._media = [
            EncodedPicture(self.seen, len(medium.image.tiles), next(stops), medium.bounds)
            if isinstance(medium, Picture)
            else encoded[id(medium)]
            for medium in prompt.media
        ]

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def is_fed(self) -> bool:
        """Whether `take` has returned all rows."""
        return self.fed == len(self._ids)

    @property
    def _missing(self) -> EncodedPicture | EncodedSounds | None:
        """The first picture or message with sounds that is not encoded."""
        return next((medium for medium in self._media if not medium.is_encoded), None)

    @property
    def part(self) -> Part:
        """The part that does the next piece of work, unless all rows are fed."""
        missing = self._missing
        if missing is None or missing.start > self.fed:
            return Part.FEED
        return Part.HEAR if isinstance(missing, EncodedSounds) else Part.SEE

    @property
    def left(self) -> int:
        """How many rows can be taken, or how many tiles to encode, before another part is next."""
        missing = self._missing
        if missing is None:
            return len(self._ids) - self.fed
        if missing.start > self.fed:
            return missing.start - self.fed
        if isinstance(missing, EncodedSounds):
            return 1
        near = [
            medium
            for medium in self._media
            if isinstance(medium, EncodedPicture) and medium.start < self.fed + SEEN_ROWS
        ]
        return near[-1].stop - self.seen.count

    def hear(self) -> None:
        """Encode the next batch of sounds of the whole prompt."""
        missing = self._missing
        if isinstance(missing, EncodedSounds):
            missing.encode_next()

    def take(self, count: int) -> Tensor:
        """Return the next embeddings [rows, hidden], at most `count`; see `left`."""
        start, stop = self.fed, min(self.fed + count, len(self._ids))
        rows = self._parts.llm.embed(self._ids[start:stop])
        for medium in self._media:
            if medium.start >= stop:
                break
            medium.write_into(rows, start)
        self._media = [medium for medium in self._media if medium.bounds[-1][1] > stop]
        self.fed = stop
        return rows


class Medium(ABC):
    """A picture, or the sounds of one message.

    `bounds` are the ranges of rows that its embeddings fill in the prompt, each as (first row, row
    after the last).
    """

    def __init__(self, bounds: Sequence[Bound]) -> None:
        self.bounds = bounds
        self._joined: Tensor | None = None

    @property
    def start(self) -> int:
        """The first row."""
        return self.bounds[0][0]

    @property
    @abstractmethod
    def is_encoded(self) -> bool:
        """Whether all embeddings are computed."""

    @abstractmethod
    def join(self) -> Tensor:
        """Return the embeddings of all rows, [rows, hidden]. Called once, after `is_encoded`."""

    def write_into(self, rows: Tensor, start: int) -> None:
        """Write the embeddings into `rows`, which are the prompt's rows from row `start` on."""
        if self._joined is None:
            self._joined = self.join().to(rows.dtype)
        stop, before = start + len(rows), 0
        for first, last in self.bounds:
            low, high = max(first, start), min(last, stop)
            if low < high:
                offset = before - first
                rows[low - start : high - start] = self._joined[low + offset : high + offset]
            before += last - first


class EncodedPicture(Medium):
    """A picture of `tiles` tiles. It is encoded when `stop` tiles of the prompt are."""

    def __init__(self, seen: SeenTiles, tiles: int, stop: int, bounds: Sequence[Bound]) -> None:
        super().__init__(bounds)
        self._seen, self._tiles, self.stop = seen, tiles, stop

    @property
    def is_encoded(self) -> bool:
        return self._seen.count >= self.stop

    def join(self) -> Tensor:
        return torch.cat([self._seen.embeds.popleft() for _ in range(self._tiles)])


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


class EncodedSounds(Medium):
    """The sounds of one message. `embeds` [rows, hidden] are the embeddings so far, in order."""

    def __init__(self, sounds: MessageSounds, batches: Iterator[None]) -> None:
        super().__init__(sounds.bounds)
        self._clips = sounds.clips
        self._batches = batches
        self.embeds: list[Tensor] = []

    def clips(self, config: AudioConfig) -> list[FloatArray]:
        """Return the clips, joined to one clip unless that would give too few embeddings."""
        if not self._clips:
            return []
        joined = np.concatenate(self._clips)
        return [joined] if clip_rows(config, len(joined)) >= self._count else self._clips

    @property
    def _count(self) -> int:
        return sum(stop - start for start, stop in self.bounds)

    @property
    def is_encoded(self) -> bool:
        return sum(map(len, self.embeds)) >= self._count

    def encode_next(self) -> None:
        """Encode the next batch of sounds of the whole prompt."""
        next(self._batches)

    def join(self) -> Tensor:
        return torch.cat(self.embeds)
