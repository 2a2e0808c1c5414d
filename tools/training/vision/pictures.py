"""Draws the pictures that the default model learns to see: coloured shapes, and digits.

A picture has one to five objects of one shape and colour, or one digit, or nothing: then it is
plain, or a texture of many colours. It looks like the picture of a camera: the light is uneven, and
the image is blurred and noisy. Only the evaluation renders some
pairs of a shape and a colour, and uses some fonts.
"""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from training.domain import DIGITS
from training.vision.scenes import COLOURS, NOTHING, SHAPES, Scene, is_held_out

FONT_FOLDERS = ("/usr/share/fonts", "/usr/local/share/fonts")
FONT_FAMILIES = ("DejaVu", "Liberation")
HELD_OUT_FONT, FONT_STRIDE = 3, 7
"""Of the fonts in order of their names, every seventh is for the evaluation only."""
PLAIN_SHARE, TEXTURE_SHARE, DIGIT_SHARE = 0.04, 0.06, 0.38
PIXELS = {
    "red": (205, 35, 40),
    "green": (30, 150, 60),
    "blue": (35, 75, 200),
    "yellow": (245, 210, 30),
    "black": (25, 25, 28),
    "white": (245, 245, 245),
}
_SIDE = 144
"""Pixels of the shorter side of a picture."""
_FINE = 2
"""Objects are drawn with this many times the pixels, so that their edges are smooth."""
_LEAST_CONTRAST = 110.0
_JITTER = 28
_NOISE_PIXELS = 1 << 20

Colour = tuple[int, int, int]
Point = tuple[float, float]


@dataclass(frozen=True)
class Mark:
    """The place of an object: its centre and radius in pixels of the picture."""

    x: float
    y: float
    radius: float


@dataclass(frozen=True)
class Picture:
    """A scene and its picture, an RGB image. `marks` are the places of the objects."""

    scene: Scene
    image: Image.Image
    marks: tuple[Mark, ...] = ()

    def jpeg(self, quality: int = 80) -> bytes:
        """Return the picture as a client sends it."""
        file = io.BytesIO()
        self.image.save(file, "JPEG", quality=quality)
        return file.getvalue()


def draw_scene(chance: Random, *, held_out: bool | None = False) -> Scene:
    """Draw what a picture shows.

    The pairs of shape and colour are those of training, or those for the evaluation only if
    `held_out` is true; all if it is None.
    """
    kind = chance.random()
    if kind < PLAIN_SHARE:
        return Scene(NOTHING)
    if kind < PLAIN_SHARE + TEXTURE_SHARE:
        return Scene(NOTHING, is_texture=True)
    colours = list(COLOURS)
    if kind < PLAIN_SHARE + TEXTURE_SHARE + DIGIT_SHARE:
        return Scene("digit", chance.choice(colours), 1, chance.randrange(len(DIGITS)))
    count = 1 if chance.random() < 0.3 else chance.randint(1, 5)
    while True:
        scene = Scene(chance.choice(SHAPES), chance.choice(colours), count)
        if held_out is None or is_held_out(scene) == held_out:
            return scene


def draw_picture(
    chance: Random, scene: Scene | None = None, *, held_out: bool | None = False
) -> Picture:
    """Draw a picture of a scene, or of a random one. `held_out` also chooses the fonts."""
    scene = scene or draw_scene(chance, held_out=held_out)
    numbers = np.random.default_rng(chance.getrandbits(64))
    longer = round(_SIDE * chance.uniform(1.0, 1.78))
    size = (longer, _SIDE) if chance.random() < 0.8 else (_SIDE, longer)
    if scene.is_texture:
        return Picture(scene, _camera(_texture(size, numbers), chance, numbers))
    near = PIXELS.get(scene.colour)
    colour = _near(near, chance) if near else None
    image = _background(size, colour, chance, numbers)
    marks = [] if colour is None else _place(image, scene, colour, chance, held_out=held_out)
    found = tuple(Mark(at.x / _FINE, at.y / _FINE, at.radius / _FINE) for at in marks)
    return Picture(scene, _camera(image.reduce(_FINE), chance, numbers), found)


def _near(colour: Colour, chance: Random) -> Colour:
    """Return a shade of a colour: not all red things have the same red."""
    light = chance.uniform(0.8, 1.1)
    red, green, blue = (
        min(255, max(0, round(part * light + chance.uniform(-_JITTER, _JITTER) / 2)))
        for part in colour
    )
    return red, green, blue


def _background(
    size: tuple[int, int], colour: Colour | None, chance: Random, numbers: np.random.Generator
) -> Image.Image:
    """Draw a sheet, a wall or a table that differs from `colour`."""
    while True:
        base = chance.randint(20, 250)
        tint = 60 if chance.random() < 0.3 else 12
        shade = tuple(min(255, max(0, base + chance.randint(-tint, tint))) for _ in range(3))
        if colour is None or math.dist(colour, shade) > _LEAST_CONTRAST:
            break
    columns, rows = chance.randint(2, 4), chance.randint(2, 4)
    spread = chance.uniform(0.0, 14.0)
    coarse = numbers.normal(0.0, spread, (rows, columns, 1)) + np.asarray(shade, float)
    small = Image.fromarray(coarse.clip(0, 255).astype(np.uint8))
    return small.resize((size[0] * _FINE, size[1] * _FINE), Image.Resampling.BILINEAR)


def _texture(size: tuple[int, int], numbers: np.random.Generator) -> Image.Image:
    """Draw spots of many sizes and colours, as leaves, cloth or a crowd have them."""
    total = np.full((size[1], size[0], 3), numbers.uniform(60, 190), np.float32)
    total += numbers.uniform(-40, 40, 3).astype(np.float32)
    for cells in (3, 7, 16, 40, 90):
        grey = numbers.normal(0.0, 1.0, (cells, cells, 1))
        tint = numbers.normal(0.0, 0.6, (cells, cells, 3))
        coarse = 128.0 + (grey + tint) * numbers.uniform(8, 45)
        image = Image.fromarray(coarse.clip(0, 255).astype(np.uint8))
        total += np.asarray(image.resize(size, Image.Resampling.BICUBIC), np.float32) - 128.0
    return Image.fromarray(total.clip(0, 255).astype(np.uint8))


def _place(
    image: Image.Image, scene: Scene, colour: Colour, chance: Random, *, held_out: bool | None
) -> list[Mark]:
    """Draw the objects of a scene, apart from each other; return their places."""
    width, height = image.size
    most = min(width, height) * (0.42 if scene.count == 1 else 0.3 if scene.count < 4 else 0.24)
    radius = most * chance.uniform(0.6, 1.0)
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
    turn = chance.uniform(-180.0, 180.0)
    marks: list[Mark] = []
    for at in placed:
        own = radius * chance.uniform(0.85, 1.0)
        if scene.digit >= 0:
            _write(image, str(scene.digit), at, own, colour, chance, held_out=held_out)
        else:
            _draw_shape(image, scene.shape, at, own, colour, turn + chance.uniform(-30, 30))
        marks.append(Mark(at[0], at[1], own))
    return marks


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
    image: Image.Image,
    text: str,
    at: Point,
    radius: float,
    colour: Colour,
    chance: Random,
    *,
    held_out: bool | None,
) -> None:
    """Write a digit, turned a little, as on a sheet that is held into the camera."""
    height = round(2.1 * radius)
    found = fonts(held_out)
    font = _font(chance.choice(found) if found else "", height)
    mask = Image.new("L", (2 * height, 2 * height))
    pen = ImageDraw.Draw(mask)
    weight = chance.choice((0, 0, 0, height // 40, height // 20))
    pen.text((height, height), text, fill=255, font=font, anchor="mm", stroke_width=weight)
    # The inverse of a turn by `angle`, of a stretch and of a slant, about the middle.
    angle = math.radians(chance.uniform(-20, 20))
    wide, slant = chance.uniform(0.8, 1.25), chance.uniform(-0.2, 0.2)
    a, b = math.cos(angle) * wide, math.sin(angle) * wide + slant
    d, e = -math.sin(angle), math.cos(angle)
    middle = (height * (1 - a - b), height * (1 - d - e))
    mask = mask.transform(
        mask.size,
        Image.Transform.AFFINE,
        (a, b, middle[0], d, e, middle[1]),
        Image.Resampling.BILINEAR,
    )
    corner = (round(at[0] - height), round(at[1] - height))
    image.paste(Image.new("RGB", mask.size, colour), corner, mask)


@cache
def _font(path: str, height: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.truetype(path, height) if path else ImageFont.load_default(height)


@cache
def fonts(held_out: bool | None) -> list[str]:
    """Return the paths of this machine's fonts for training, or for the evaluation; sorted."""
    found = sorted(
        str(path)
        for folder in FONT_FOLDERS
        for path in Path(folder).rglob("*.ttf")
        if path.name.startswith(FONT_FAMILIES) and "Math" not in path.name
    )
    if held_out is None:
        return found
    return [
        path
        for number, path in enumerate(found)
        if (number % FONT_STRIDE == HELD_OUT_FONT) == held_out
    ]


@cache
def _noise() -> NDArray[np.float32]:
    """Return normal numbers, drawn once; pictures use random parts of them."""
    return np.random.default_rng(77).standard_normal(_NOISE_PIXELS).astype(np.float32)


def _camera(image: Image.Image, chance: Random, numbers: np.random.Generator) -> Image.Image:
    """Photograph a drawn image: in uneven light, blurred, noisy."""
    if chance.random() < 0.5:
        image = image.filter(ImageFilter.GaussianBlur(chance.uniform(0.2, 1.6)))
    pixels = np.asarray(image, np.float32)
    light = np.linspace(chance.uniform(0.75, 1.1), chance.uniform(0.75, 1.1), image.size[0])
    warm = np.asarray([1 + chance.uniform(-0.07, 0.07) for _ in range(3)])
    pixels = pixels * (light[None, :, None] * warm).astype(np.float32)
    bank = _noise()
    start = int(numbers.integers(len(bank) - pixels.size))
    drawn = bank[start : start + pixels.size].reshape(pixels.shape)
    pixels += drawn * np.float32(chance.uniform(0.5, 9.0))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
