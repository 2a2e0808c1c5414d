"""Plain values that only this family uses: numpy only, no torch."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from duplane.worker.models.types import ConversationOptions, OptionError, WindowMode

Size = tuple[int, int]
"""Width and height in pixels."""
Grid = tuple[int, int]
"""Columns and rows of the slices of an image."""

INPUT_SAMPLE_RATE = 16_000
OUTPUT_SAMPLE_RATE = 24_000
UNIT_S = 1.0


@dataclass(frozen=True)
class ImageTile:
    """A scaled image, or one slice of it: `rows` x `columns` patches in reading order.

    `patches` are uint8 [rows * columns, 3 * patch_size^2], ordered by channel, line and pixel.
    """

    patches: NDArray[np.uint8]
    rows: int
    columns: int


@dataclass(frozen=True)
class PreparedImage:
    """The input of the vision encoder for one image: the whole image, then its slices row by row.

    `size` is the size of the decoded image. `grid` is None for an image without slices.
    """

    tiles: tuple[ImageTile, ...]
    grid: Grid | None
    size: Size

    @property
    def piece_count(self) -> int:
        """The number of tiles."""
        return len(self.tiles)


@dataclass(frozen=True)
class WindowRules:
    """The rules that limit the length of a conversation's context, named like the options.

    See `duplex.context_window`.
    """

    sliding_window_mode: WindowMode = WindowMode.OFF
    basic_window_high_tokens: int = 4000
    basic_window_low_tokens: int = 3500
    context_max_units: int = 24
    context_previous_max_tokens: int = 500

    def chosen(self, options: ConversationOptions, capacity: int) -> WindowRules:
        """Return these rules with the values that `options` set, for `capacity` context rows.

        The text of dropped units may use at most a quarter of the capacity. Raises `OptionError`.
        """
        own = {entry.name: getattr(options, entry.name) for entry in fields(self)}
        rules = replace(self, **{name: value for name, value in own.items() if value is not None})
        rules.check()
        words = min(rules.context_previous_max_tokens, capacity // 4)
        return replace(rules, context_previous_max_tokens=words)

    def check(self) -> None:
        """Raise `OptionError` if the low mark is above the high mark."""
        if self.basic_window_low_tokens > self.basic_window_high_tokens:
            raise OptionError(
                "basic_window_low_tokens",
                f"is {self.basic_window_low_tokens}, more than basic_window_high_tokens, "
                f"{self.basic_window_high_tokens}",
            )
