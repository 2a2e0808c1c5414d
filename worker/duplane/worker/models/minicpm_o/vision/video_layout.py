"""Chooses the pictures and the sound of a video that the model gets. Pure.

As in the reference, a video becomes scenes. A scene is one picture, followed by the sound up to the
next picture. There is one scene per second; a video longer than `MAX_SCENES` seconds has
`MAX_SCENES` evenly spread scenes. `stack_frames` is the number of pictures that are used of each
second: the first as it is, the others joined side by side to one picture. For videos longer than
`MAX_SCENES` seconds, the reference joins pictures of unrelated moments and drops the others. Here
each scene has the joined pictures of its own time span.
Source: `get_video_frame_audio_segments` of the PyPI package minicpmo-utils 1.0.6.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

MAX_SCENES = 64
LEAST_LAST_SAMPLES = 1600
"""Least number of samples of the last scene's sound. A shorter sound is padded with silence."""
JOINT_PIXELS = 6
"""Pixels between pictures that are joined side by side."""
_BACKGROUND, _JOINT = (255, 255, 255), (0, 0, 0)

Size = tuple[int, int]


@dataclass(frozen=True)
class Scene:
    """One picture at `time_s`, and the sound up to `until_s`.

    `stacked_s` are the times of further pictures, which are joined to a single one.
    """

    time_s: float
    until_s: float
    stacked_s: tuple[float, ...] = ()

    def cut(self, samples: np.ndarray, rate_hertz: int, *, is_last: bool) -> np.ndarray:
        """Cut the sound of the scene out of the `samples` [n] of the whole video."""
        sound = samples[int(self.time_s * rate_hertz) : int(self.until_s * rate_hertz)]
        if not is_last:
            return sound
        return np.pad(sound, (0, max(0, LEAST_LAST_SAMPLES - len(sound))))


def plan_scenes(duration_s: float, stack_frames: int = 1) -> list[Scene]:
    """Divide a video of `duration_s` seconds into at least one and at most `MAX_SCENES` scenes."""
    second_count = max(1, math.ceil(duration_s))
    if duration_s > MAX_SCENES:
        tenths = [round(number * 0.1, 1) for number in range(int(duration_s / 0.1))]
        starts = _spread(tenths, MAX_SCENES)
    else:
        starts = [float(second) for second in range(second_count)]
    between = [
        second + number / stack_frames
        for second in range(second_count)
        for number in range(1, stack_frames)
        if second + number / stack_frames < duration_s
    ]
    between = _spread(between, MAX_SCENES * (stack_frames - 1))
    ends = [*starts[1:], max(duration_s, starts[-1])]
    borders = [*starts[1:], math.inf]
    return [
        Scene(start, end, tuple(moment for moment in between if start <= moment < border))
        for start, end, border in zip(starts, ends, borders, strict=True)
    ]


def _spread(moments: list[float], count: int) -> list[float]:
    """Choose at most `count` of the moments, evenly spread, including the first and the last."""
    if len(moments) <= count:
        return moments
    return [moments[at] for at in np.linspace(0, len(moments) - 1, count, dtype=int)]


def side_by_side(pictures: Sequence[Image.Image]) -> Image.Image:
    """Join pictures to one. Each is scaled to fit into a cell as large as the largest picture.

    Two or three pictures form a row or a column, whichever is nearer to a square. Four pictures
    form a square. More pictures form a row.
    """
    cell = (max(one.width for one in pictures), max(one.height for one in pictures))
    columns, rows = _grid(pictures, cell)
    whole = Image.new("RGB", _canvas(cell, columns, rows), _JOINT)
    for index, picture in enumerate(pictures):
        row, column = divmod(index, columns)
        corner = column * (cell[0] + JOINT_PIXELS), row * (cell[1] + JOINT_PIXELS)
        whole.paste(_fitted(picture, cell), corner)
    return whole


def _canvas(cell: Size, columns: int, rows: int) -> Size:
    gaps = (columns - 1) * JOINT_PIXELS, (rows - 1) * JOINT_PIXELS
    return columns * cell[0] + gaps[0], rows * cell[1] + gaps[1]


def _grid(pictures: Sequence[Image.Image], cell: Size) -> tuple[int, int]:
    """Choose the number of columns and rows."""
    count = len(pictures)
    if count == 4:
        return 2, 2
    if count not in (2, 3):
        return count, 1

    def distance(grid: tuple[int, int]) -> float:
        width, height = _canvas(cell, *grid)
        return abs(width / height - 1)

    row, column = (count, 1), (1, count)
    if distance(row) != distance(column) or count == 3:
        return min(row, column, key=distance)
    is_wide = sum(one.width / one.height for one in pictures) / count >= 1
    return row if is_wide else column


def _fitted(picture: Image.Image, cell: Size) -> Image.Image:
    """Scale a picture to fit into the cell and centre it."""
    scale = min(cell[0] / picture.width, cell[1] / picture.height)
    size = max(1, round(picture.width * scale)), max(1, round(picture.height * scale))
    whole = Image.new("RGB", cell, _BACKGROUND)
    resized = picture.resize(size, Image.Resampling.BICUBIC)
    whole.paste(resized, ((cell[0] - size[0]) // 2, (cell[1] - size[1]) // 2))
    return whole
