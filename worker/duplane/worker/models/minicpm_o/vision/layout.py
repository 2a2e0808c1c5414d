"""The layout of an image in a prompt: special tokens around the embeddings of its tiles. Pure.

The layout depends only on the grid of slices.
Source: `MiniCPMO45/processing_minicpmo.py` of OpenBMB/MiniCPM-o-Demo@28b60cf.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from duplane.worker.models.minicpm_o.checkpoint import field
from duplane.worker.models.minicpm_o.types import Grid

Layout = tuple[str | int, ...]
"""Special tokens as text, and tiles as indices: 0 is the whole image, 1 and more its slices."""


@dataclass(frozen=True)
class ImageMarks:
    """The special tokens around images, as preprocessor_config.json names them."""

    image_start: str = "<image>"
    image_end: str = "</image>"
    slice_start: str = "<slice>"
    slice_end: str = "</slice>"
    id_start: str = "<image_id>"
    id_end: str = "</image_id>"
    unknown: str = "<unk>"
    """Placeholder of one embedding."""
    has_id: bool = False
    """Whether images of a chat are numbered if the request does not decide this."""

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> ImageMarks:
        """Read preprocessor_config.json; raises `CheckpointError`."""
        return cls(
            image_start=field(config, "im_start", str, cls.image_start),
            image_end=field(config, "im_end", str, cls.image_end),
            slice_start=field(config, "slice_start", str, cls.slice_start),
            slice_end=field(config, "slice_end", str, cls.slice_end),
            id_start=field(config, "im_id_start", str, cls.id_start),
            id_end=field(config, "im_id_end", str, cls.id_end),
            unknown=field(config, "unk", str, cls.unknown),
            has_id=field(config, "use_image_id", bool, cls.has_id),
        )


def tile_rows(config: Mapping[str, Any]) -> int:
    """Return the number of embeddings of one tile, which config.json has as `query_num`."""
    return field(config, "query_num", int, 64)


def duplex_layout(marks: ImageMarks, grid: Grid | None) -> Layout:
    """Lay out a frame of a duplex unit; every string is one special token."""
    layout: list[str | int] = [marks.image_start, 0, marks.image_end]
    for index in range(1, tile_count(grid)):
        layout += [marks.slice_start, index, marks.slice_end]
    return tuple(layout)


def chat_layout(marks: ImageMarks, grid: Grid | None, image_id: int | None = None) -> Layout:
    """Lay out an image of a chat message, with one line of text per row of slices.

    If `image_id` is given, the image has this number.
    """
    number = "" if image_id is None else f"{marks.id_start}{image_id}{marks.id_end}"
    layout: list[str | int] = [number + marks.image_start, 0, marks.image_end]
    columns, rows = grid or (0, 0)
    for row in range(rows):
        for column in range(columns):
            is_new_line = row > 0 and column == 0
            start = "\n" + marks.slice_start if is_new_line else marks.slice_start
            layout += [start, 1 + row * columns + column, marks.slice_end]
    return tuple(layout)


def placeholder_text(marks: ImageMarks, layout: Layout, rows: int) -> str:
    """Join a layout to one text. Each tile becomes `rows` placeholders."""
    return "".join(part if isinstance(part, str) else marks.unknown * rows for part in layout)


def tile_count(grid: Grid | None) -> int:
    """Count the tiles of an image: the image itself and its slices."""
    return 1 if grid is None else 1 + grid[0] * grid[1]


def duplex_rows(grids: Iterable[Grid | None], rows: int) -> int:
    """Count the context rows of duplex frames: two marks and `rows` embeddings per tile."""
    return sum(tile_count(grid) * (rows + 2) for grid in grids)
