"""Draws the pictures that the default model learns to see: coloured shapes, and digits.

A picture has one to five objects of one shape and colour, or one digit, or nothing. It looks like
the picture of a camera: the light is uneven, the sheet may be turned, and the image is blurred and
noisy. Pictures of training and of evaluation come from different seeds.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from training.domain import DIGITS

COLOURS = {
    "red": (205, 35, 40),
    "green": (30, 150, 60),
    "blue": (35, 75, 200),
    "yellow": (245, 210, 30),
    "black": (25, 25, 28),
    "white": (245, 245, 245),
}
SHAPES = ("circle", "square", "triangle", "star", "cross")
MOST_OBJECTS = 5
NOTHING, DIGIT = "nothing", "digit"
FONT_FOLDERS = ("/usr/share/fonts", "/usr/local/share/fonts")
_SIDE = 160
"""Pixels of the shorter side of a picture before it is encoded or scaled."""
_FINE = 2
"""Objects are drawn with this many times the pixels, so that their edges are smooth."""
_LEAST_CONTRAST = 110.0
_JITTER = 28
_TURN_DEGREES = 180.0
_SHIFT = 0.35

Colour = tuple[int, int, int]
Point = tuple[float, float]


@dataclass(frozen=True)
class Scene:
    """What a picture shows: `count` objects of a shape, or `digit`, in a colour; or nothing.

    `shape` is one of `SHAPES`, `DIGIT` or `NOTHING`. `digit` is -1 if the picture has none.
    """

    shape: str
    colour: str = ""
    count: int = 0
    digit: int = -1


@dataclass(frozen=True)
class Picture:
    """A scene and its picture, an RGB image."""

    scene: Scene
    image: Image.Image

    def jpeg(self, quality: int = 70) -> bytes:
        """Return the picture as a client sends it."""
        file = io.BytesIO()
        self.image.save(file, "JPEG", quality=quality)
        return file.getvalue()


def draw_scene(chance: Random) -> Scene:
    """Draw what a picture shows."""
    kind = chance.random()
    if kind < 0.06:
        return Scene(NOTHING)
    colour = chance.choice(list(COLOURS))
    if kind < 0.34:
        return Scene(DIGIT, colour, 1, chance.randrange(len(DIGITS)))
    count = 1 if chance.random() < 0.35 else chance.randint(1, MOST_OBJECTS)
    return Scene(chance.choice(SHAPES), colour, count)


def draw_picture(chance: Random, scene: Scene | None = None) -> Picture:
    """Draw a picture of a scene, or of a random one."""
    scene = scene or draw_scene(chance)
    numbers = np.random.default_rng(chance.getrandbits(64))
    width = round(_SIDE * chance.uniform(1.0, 1.78))
    size = (width, _SIDE) if chance.random() < 0.8 else (_SIDE, width)
    near = COLOURS.get(scene.colour)
    colour = _near(near, chance) if near else None
    image = _background(size, colour, chance, numbers)
    if colour:
        _place(image, scene, colour, chance)
    return Picture(scene, _camera(image, chance, numbers))


def _near(colour: Colour, chance: Random) -> Colour:
    """Return a shade of a colour: not all red things have the same red."""
    light = chance.uniform(0.8, 1.1)
    red, green, blue = (
        min(255, max(0, round(part * light + chance.uniform(-_JITTER, _JITTER) / 2)))
        for part in colour
    )
    return red, green, blue


def _distance(first: Colour, second: Colour) -> float:
    return math.dist(first, second)


def _background(
    size: tuple[int, int], colour: Colour | None, chance: Random, numbers: np.random.Generator
) -> Image.Image:
    """Draw a sheet, a wall or a table that differs from `colour`."""
    while True:
        base = chance.randint(20, 250)
        tint = 60 if chance.random() < 0.3 else 12
        shade = tuple(min(255, max(0, base + chance.randint(-tint, tint))) for _ in range(3))
        if colour is None or _distance(colour, (shade[0], shade[1], shade[2])) > _LEAST_CONTRAST:
            break
    width, height = size
    columns, rows = chance.randint(2, 4), chance.randint(2, 4)
    spread = chance.uniform(0.0, 14.0)
    coarse = numbers.normal(0.0, spread, (rows, columns, 1)) + np.asarray(shade, float)
    small = Image.fromarray(coarse.clip(0, 255).astype(np.uint8))
    return small.resize((width * _FINE, height * _FINE), Image.Resampling.BICUBIC)


def _place(image: Image.Image, scene: Scene, colour: Colour, chance: Random) -> None:
    """Draw the objects of a scene, apart from each other."""
    width, height = image.size
    most = min(width, height) * (0.42 if scene.count == 1 else 0.3 if scene.count < 4 else 0.22)
    radius = most * chance.uniform(0.55, 1.0)
    placed: list[Point] = []
    tries = 0
    while len(placed) < scene.count:
        tries += 1
        if tries % 40 == 0:  # no place is left
            radius *= 0.9
            placed.clear()
        at = (chance.uniform(radius, width - radius), chance.uniform(radius, height - radius))
        if all(math.dist(at, other) > 2.25 * radius for other in placed):
            placed.append(at)
    turn = chance.uniform(-_TURN_DEGREES, _TURN_DEGREES)
    for at in placed:
        own = radius * chance.uniform(0.85, 1.0)
        if scene.digit >= 0:
            _write(image, str(scene.digit), at, own, colour, chance)
        else:
            _draw_shape(image, scene.shape, at, own, colour, turn + chance.uniform(-30, 30))


def _draw_shape(
    image: Image.Image, shape: str, at: Point, radius: float, colour: Colour, turn: float
) -> None:
    pen = ImageDraw.Draw(image)
    if shape == "circle":
        pen.ellipse([at[0] - radius, at[1] - radius, at[0] + radius, at[1] + radius], fill=colour)
        return
    corners = [
        (
            at[0] + radius * length * math.cos(math.radians(angle + turn)),
            at[1] + radius * length * math.sin(math.radians(angle + turn)),
        )
        for angle, length in _OUTLINES[shape]
    ]
    pen.polygon(corners, fill=colour)


def _star() -> list[Point]:
    return [(36.0 * n, 1.0 if n % 2 == 0 else 0.42) for n in range(10)]


def _cross() -> list[Point]:
    """Return the twelve corners of a plus sign whose arms are a third as wide as long."""
    outer, inner = math.hypot(1.0, 1 / 3), math.hypot(1 / 3, 1 / 3)
    near = math.degrees(math.atan2(1 / 3, 1.0))
    corners: list[Point] = []
    for side in range(4):
        corners += [(90.0 * side - near, outer), (90.0 * side + near, outer)]
        corners.append((90.0 * side + 45.0, inner))
    return corners


_OUTLINES: dict[str, list[Point]] = {
    "square": [(90.0 * n + 45, 1.0) for n in range(4)],
    "triangle": [(120.0 * n, 1.0) for n in range(3)],
    "star": _star(),
    "cross": _cross(),
}


def _write(
    image: Image.Image, text: str, at: Point, radius: float, colour: Colour, chance: Random
) -> None:
    """Write a digit, turned a little, as on a sheet that is held into the camera."""
    height = round(2.1 * radius)
    found = fonts()
    font: ImageFont.ImageFont | ImageFont.FreeTypeFont
    if found:
        font = ImageFont.truetype(chance.choice(found), height)
    else:
        font = ImageFont.load_default(height)
    mask = Image.new("L", (2 * height, 2 * height))
    pen = ImageDraw.Draw(mask)
    weight = chance.choice((0, 0, 0, height // 40, height // 20))
    pen.text((height, height), text, fill=255, font=font, anchor="mm", stroke_width=weight)
    mask = mask.rotate(chance.uniform(-20, 20), Image.Resampling.BICUBIC)
    corner = (round(at[0] - height), round(at[1] - height))
    image.paste(Image.new("RGB", mask.size, colour), corner, mask)


@cache
def fonts() -> list[str]:
    """Return the paths of the fonts of this machine, sorted; none if it has none."""
    return sorted(
        str(path)
        for folder in FONT_FOLDERS
        for path in Path(folder).rglob("*.ttf")
        if not any(part in path.name for part in ("Symbol", "Math", "Emoji", "Dingbats"))
    )


def _camera(image: Image.Image, chance: Random, numbers: np.random.Generator) -> Image.Image:
    """Photograph a drawn image: turned, in uneven light, blurred, noisy."""
    if chance.random() < 0.6:
        corner = image.getpixel((2, 2))
        fill = corner if isinstance(corner, tuple) else 0
        angle, scale = chance.uniform(-12, 12), chance.uniform(1.0, 1.12)
        width, height = image.size
        turned = image.rotate(angle, Image.Resampling.BICUBIC, fillcolor=fill)
        cut = (width - width / scale) / 2 * _SHIFT, (height - height / scale) / 2 * _SHIFT
        box = (cut[0], cut[1], width - cut[0], height - cut[1])
        image = turned.resize((width, height), Image.Resampling.BICUBIC, box)
    size = (image.size[0] // _FINE, image.size[1] // _FINE)
    image = image.resize(size, Image.Resampling.BOX)
    if chance.random() < 0.5:
        image = image.filter(ImageFilter.GaussianBlur(chance.uniform(0.2, 1.8)))
    pixels = np.asarray(image, np.float32)
    light = np.linspace(chance.uniform(0.75, 1.1), chance.uniform(0.75, 1.1), size[0])
    pixels = pixels * light[None, :, None].astype(np.float32)
    warm = [1 + chance.uniform(-0.07, 0.07) for _ in range(3)]
    pixels = pixels * np.asarray(warm, np.float32)
    pixels = pixels + numbers.normal(0.0, chance.uniform(0.5, 9.0), pixels.shape)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
