"""The scenes into which a video is divided, and the joining of pictures side by side."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from duplane.worker.models.minicpm_o.vision.video_layout import (
    JOINT_PIXELS,
    LEAST_LAST_SAMPLES,
    MAX_SCENES,
    plan_scenes,
    side_by_side,
)

RATE = 16_000


def test_a_short_video_has_a_picture_for_each_started_second() -> None:
    scenes = plan_scenes(2.5)
    assert [(scene.time_s, scene.until_s) for scene in scenes] == [(0, 1), (1, 2), (2, 2.5)]


def test_a_long_video_has_the_greatest_number_of_pictures_evenly_spread() -> None:
    scenes = plan_scenes(100.04)
    times = [scene.time_s for scene in scenes]
    assert (len(times), times[0], times[-1]) == (MAX_SCENES, 0.0, 99.9)
    assert np.diff(times).min() >= 1.5
    assert scenes[-1].until_s == 100.04


def test_stacked_pictures_belong_to_the_scene_of_their_second() -> None:
    scenes = plan_scenes(1.5, stack_frames=4)
    assert [scene.stacked_s for scene in scenes] == [(0.25, 0.5, 0.75), (1.25,)]


@given(st.floats(0, 4000), st.integers(1, 10))
def test_scenes_cover_the_sound_and_contain_their_stacked_pictures(
    duration_s: float, stack: int
) -> None:
    scenes = plan_scenes(duration_s, stack)
    assert 1 <= len(scenes) <= MAX_SCENES
    assert sum(len(scene.stacked_s) for scene in scenes) <= MAX_SCENES * (stack - 1)
    borders = [*(scene.time_s for scene in scenes[1:]), np.inf]
    for scene, border in zip(scenes, borders, strict=True):
        assert all(scene.time_s <= moment < border for moment in scene.stacked_s)
    assert [scene.until_s for scene in scenes[:-1]] == borders[:-1]


def test_only_the_last_sound_is_padded_with_silence() -> None:
    first, last = plan_scenes(1.05)
    samples = np.ones(int(1.05 * RATE), np.float32)
    assert len(first.cut(samples, RATE, is_last=False)) == RATE
    padded = last.cut(samples, RATE, is_last=True)
    assert len(padded) == LEAST_LAST_SAMPLES
    assert padded.sum() == 800
    assert len(last.cut(samples[:100], RATE, is_last=False)) == 0


def picture(width: int, height: int, red: int = 0) -> Image.Image:
    return Image.new("RGB", (width, height), (red, 0, 0))


@pytest.mark.parametrize(
    ("count", "size", "columns", "rows"),
    [
        (1, (60, 40), 1, 1),
        (2, (60, 40), 1, 2),
        (2, (40, 60), 2, 1),
        (3, (60, 40), 1, 3),
        (3, (30, 90), 3, 1),
        (4, (60, 40), 2, 2),
        (5, (60, 40), 5, 1),
        (9, (60, 40), 9, 1),
    ],
)
def test_pictures_are_joined_side_by_side_with_gaps(
    count: int, size: tuple[int, int], columns: int, rows: int
) -> None:
    whole = side_by_side([picture(*size, 10 * number) for number in range(count)])
    width, height = size
    assert whole.size == (
        columns * width + (columns - 1) * JOINT_PIXELS,
        rows * height + (rows - 1) * JOINT_PIXELS,
    )
    for number in range(count):
        row, column = divmod(number, columns)
        corner = column * (width + JOINT_PIXELS), row * (height + JOINT_PIXELS)
        assert whole.getpixel(corner) == (10 * number, 0, 0)
    if columns > 1:
        assert whole.getpixel((width + 1, 0)) == (0, 0, 0)


def test_a_smaller_picture_is_centred_in_its_cell() -> None:
    whole = side_by_side([picture(40, 40, 50), picture(20, 40, 90)])
    assert whole.size == (40, 86)
    assert whole.getpixel((2, 66)) == (255, 255, 255)
    assert whole.getpixel((20, 66)) == (90, 0, 0)
