"""The tiles of the pictures of one slot, which are encoded in their order and in portions."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Protocol

from torch import Tensor

from duplane.worker.models.minicpm_o.types import ImageTile, PreparedImage
from duplane.worker.models.minicpm_o.vision.encoder import Vision


class SeenTiles:
    """The tiles of some pictures. `count` of them are encoded.

    `embeds` has their embeddings [rows, hidden], in order; the owner may remove the first ones.
    """

    def __init__(self, images: Iterable[PreparedImage] = ()) -> None:
        self._waiting = deque(tile for image in images for tile in image.tiles)
        self.embeds: deque[Tensor] = deque()
        self.count = 0

    @property
    def left(self) -> int:
        """The number of tiles that are not encoded yet."""
        return len(self._waiting)

    def next(self, count: int) -> list[ImageTile]:
        """Return the next tiles to encode, at most `count`."""
        return list(islice(self._waiting, count))

    def add(self, embeds: Sequence[Tensor]) -> None:
        """Add the embeddings of the next tiles."""
        for rows in embeds:
            self._waiting.popleft()
            self.embeds.append(rows)
        self.count += len(embeds)


class Seeing(Protocol):
    """A unit or a chat, and how many of its tiles a launch may encode."""

    @property
    def seen(self) -> SeenTiles: ...
    @property
    def granted(self) -> int: ...


def see(vision: Vision, items: Sequence[Seeing]) -> None:
    """Encode the next tiles of all items in one call."""
    portions = [item.seen.next(item.granted) for item in items]
    embeds = iter(vision.encode_all([tile for portion in portions for tile in portion]))
    found = [[next(embeds) for _ in portion] for portion in portions]
    for item, own in zip(items, found, strict=True):
        item.seen.add(own)
