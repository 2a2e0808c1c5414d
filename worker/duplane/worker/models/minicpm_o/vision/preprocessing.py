"""Image preprocessing: plans how an image is scaled and sliced, and has it decoded and cut.

An image that is too large to decode or to encode is refused by its header, before any of its pixels
is decoded.
Source: `MiniCPMO45/processing_minicpmo.py` of OpenBMB/MiniCPM-o-Demo@28b60cf (LLaVA-UHD slicing,
https://arxiv.org/abs/2403.11703).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from PIL import Image

from duplane.worker.models.minicpm_o.checkpoint import CheckpointError, field, read_json
from duplane.worker.models.minicpm_o.types import Grid, PreparedImage, Size
from duplane.worker.models.minicpm_o.vision.layout import ImageMarks, tile_rows
from duplane.worker.models.minicpm_o.vision.pixels import (
    MAX_PIXELS,
    Plan,
    PlannedImage,
    cut_picture,
    decode_planned,
    read_header,
)
from duplane.worker.models.types import ImageError

RULES_FILE = "preprocessor_config.json"
MAX_SLICES = 64
"""Maximum number of slices of one image. Each slice costs as much as another image."""
MAX_SCALED_AREAS = 8
"""Maximum number of patches of one tile, as a multiple of the patches of a square tile. Only narrow
strips would have more."""

Decode = Callable[[PlannedImage], PreparedImage]


@dataclass(frozen=True)
class ImageRules:
    """The image settings of preprocessor_config.json."""

    patch_size: int = 14
    scale_resolution: int = 448
    """Side in pixels of a square with the same area as a scaled tile."""
    max_slices: int = 9
    is_scaled: bool = True
    """False means that images are neither scaled nor sliced."""
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> ImageRules:
        """Read preprocessor_config.json; raises `CheckpointError`."""
        return cls(
            patch_size=field(config, "patch_size", int, cls.patch_size),
            scale_resolution=field(config, "scale_resolution", int, cls.scale_resolution),
            max_slices=field(config, "max_slice_nums", int, cls.max_slices),
            is_scaled=field(config, "slice_mode", bool, cls.is_scaled),
            mean=_per_channel(config, "norm_mean", cls.mean),
            std=_per_channel(config, "norm_std", cls.std),
        )

    def __post_init__(self) -> None:
        if not 1 <= self.patch_size <= self.scale_resolution:
            raise CheckpointError(
                f"patch_size is {self.patch_size}, scale_resolution {self.scale_resolution}"
            )
        if not 1 <= self.max_slices <= MAX_SLICES:
            raise CheckpointError(f"max_slice_nums is {self.max_slices}, not 1 to {MAX_SLICES}")
        if not all(map(math.isfinite, (*self.mean, *self.std))) or 0.0 in self.std:
            raise CheckpointError(f"norm_mean {self.mean} or norm_std {self.std} cannot be used")

    @property
    def scaled_patches(self) -> int:
        """The number of patches of a square tile. Other shapes have a few more or fewer."""
        return (self.scale_resolution // self.patch_size) ** 2


def prepare(
    rules: ImageRules,
    data: bytes,
    max_slices: int | None = None,
    max_pixels: int = MAX_PIXELS,
) -> PreparedImage:
    """Decode, scale and cut an encoded image; safe in any thread.

    `max_slices` 1 means no slices, None the checkpoint's limit. Raises `ImageError` for an image
    that cannot be used or has more than `max_pixels` pixels.
    """
    return decode_planned(plan_image(rules, data, max_slices, max_pixels))


def plan_image(
    rules: ImageRules,
    data: bytes,
    max_slices: int | None = None,
    max_pixels: int = MAX_PIXELS,
) -> PlannedImage:
    """Judge an encoded image by its header, as `prepare` does. No pixel is decoded."""
    size, scans = read_header(data, max_pixels)
    return PlannedImage(data, size, scans, _plan(rules, size, max_slices))


def prepare_picture(
    rules: ImageRules, picture: Image.Image, max_slices: int | None = None
) -> PreparedImage:
    """Scale and cut a decoded RGB image, as `prepare` does."""
    return cut_picture(picture, _plan(rules, picture.size, max_slices))


def _plan(rules: ImageRules, size: Size, max_slices: int | None) -> Plan:
    allowed = rules.max_slices if max_slices is None else max_slices
    if not 1 <= allowed <= MAX_SLICES:
        raise ImageError(f"max_slices is {allowed}, not between 1 and {MAX_SLICES}")
    return plan_sizes(rules, size, allowed)


def plan_sizes(rules: ImageRules, size: Size, max_slices: int) -> Plan:
    """Choose the scaled size of an image, and its slices.

    Raises `ImageError` for an image so narrow that its tiles would have too many patches.
    """
    patch = rules.patch_size
    if not rules.is_scaled:
        cropped = size[0] // patch * patch, size[1] // patch * patch
        plan = Plan(cropped, patch, is_scaled=False)
    else:
        grid = slice_grid(rules, size, max_slices)
        if grid is None:
            plan = Plan(_scaled(rules, size), patch)
        else:
            plan = Plan(_scaled(rules, size), patch, grid, _refined(rules, size, grid))
    largest = max(map(math.prod, plan.tile_sizes))
    # The short side of such a strip would have less than one pixel, so its tiles would be small.
    is_strip = rules.is_scaled and max(size) >= min(size) * rules.scale_resolution**2
    if is_strip or not 0 < largest <= MAX_SCALED_AREAS * rules.scaled_patches * patch**2:
        raise ImageError(f"an image of {size[0]} x {size[1]} pixels is too large or too narrow")
    return plan


def slice_grid(rules: ImageRules, size: Size, max_slices: int) -> Grid | None:
    """Choose columns and rows of slices for an image; None for an image that is not sliced.

    The wanted number of slices is the image's area divided by the area of a scaled tile, rounded
    up. The chosen number may be one more or less, and is at most `max_slices`. Of the possible
    grids, the one whose shape is nearest to the image's is chosen.
    """
    width, height = size
    areas = width * height / rules.scale_resolution**2
    wanted = min(math.ceil(areas), max_slices)
    if wanted <= 1:
        return None
    counts = [count for count in range(wanted - 1, wanted + 2) if 1 < count <= max_slices]
    grids = [
        (columns, count // columns)
        for count in counts
        for columns in range(1, count + 1)
        if count % columns == 0
    ]
    shape = math.log(width / height)
    return min(grids, key=lambda grid: abs(shape - math.log(grid[0] / grid[1])))


def _scaled(rules: ImageRules, size: tuple[float, float]) -> Size:
    """Return a size of whole patches, with the shape of `size` and about the configured area."""
    shape = size[0] / size[1]
    height = int(rules.scale_resolution / math.sqrt(shape))
    width = int(height * shape)
    return _nearest(width, rules.patch_size), _nearest(height, rules.patch_size)


def _refined(rules: ImageRules, size: Size, grid: Grid) -> Size:
    """Compute the size of the whole image so that each slice has about the configured area."""
    columns, rows = grid
    width = _nearest(size[0], columns) / columns
    height = _nearest(size[1], rows) / rows
    slice_width, slice_height = _scaled(rules, (width, height))
    return slice_width * columns, slice_height * rows


def _nearest(length: int, step: int) -> int:
    """Round `length` to a multiple of `step`, at least one; halves go to the even multiple."""
    return max(round(length / step), 1) * step


def _per_channel(
    config: Mapping[str, Any], name: str, default: tuple[float, float, float]
) -> tuple[float, float, float]:
    value: object = config.get(name, default)
    channels = cast("list[object]", value) if isinstance(value, (list, tuple)) else []
    numbers = [float(entry) for entry in channels if isinstance(entry, (int, float))]
    if len(channels) != 3 or len(numbers) != 3:
        raise CheckpointError(f"configuration field {name!r} is {value!r}, not three numbers")
    return numbers[0], numbers[1], numbers[2]


@dataclass(frozen=True)
class Pictures:
    """Prepares images for the encoder without its weights; safe in any thread.

    A tile has `rows` embeddings; `marks` are the special tokens around images. `decode` decodes the
    images of chats, `decode_frame` those of units.
    """

    rules: ImageRules
    marks: ImageMarks
    rows: int
    decode: Decode = decode_planned
    decode_frame: Decode = decode_planned

    @classmethod
    def load(cls, directory: Path, config: Mapping[str, Any]) -> Pictures | None:
        """Read preprocessor_config.json; return None if `init_vision` of config.json is false.

        Raises `CheckpointError`.
        """
        if not field(config, "init_vision", bool, True):
            return None
        rows, preprocessor = tile_rows(config), read_json(directory / RULES_FILE)
        expected = field(preprocessor, "image_feature_size", int, 64)
        if rows != expected:
            raise CheckpointError(
                f"query_num is {rows}, but {RULES_FILE} has image_feature_size {expected}"
            )
        return cls(ImageRules.from_json(preprocessor), ImageMarks.from_json(preprocessor), rows)

    def prepare(
        self, data: bytes, max_slices: int | None = None, max_pixels: int = MAX_PIXELS
    ) -> PreparedImage:
        """Decode and cut an encoded image; see the function `prepare`."""
        return self.decode(self.plan(data, max_slices, max_pixels))

    def plan(
        self, data: bytes, max_slices: int | None = None, max_pixels: int = MAX_PIXELS
    ) -> PlannedImage:
        """Judge an encoded image by its header; see the function `plan_image`."""
        return plan_image(self.rules, data, max_slices, max_pixels)

    def prepare_picture(self, picture: Image.Image, max_slices: int | None = None) -> PreparedImage:
        """Cut a decoded RGB image; see the function `prepare_picture`."""
        return prepare_picture(self.rules, picture, max_slices)
