"""Image preprocessing: decodes, scales and slices an image, and cuts it into patches.

An image that is too large to decode or to encode is refused by its header, before any of its pixels
is decoded. Uses numpy and Pillow, no torch.
Source: `MiniCPMO45/processing_minicpmo.py` of OpenBMB/MiniCPM-o-Demo@28b60cf (LLaVA-UHD slicing,
https://arxiv.org/abs/2403.11703).
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import numpy as np
from PIL import Image, UnidentifiedImageError

from duplane.worker.models.minicpm_o.checkpoint import CheckpointError, field, read_json
from duplane.worker.models.minicpm_o.types import Grid, ImageTile, PreparedImage, Size
from duplane.worker.models.minicpm_o.vision.layout import ImageMarks, tile_rows
from duplane.worker.models.types import ImageError

RULES_FILE = "preprocessor_config.json"
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")

MAX_PIXELS = 1 << 25
"""Maximum number of pixels of an encoded image; a larger image is refused before it is decoded."""
MAX_SLICES = 64
"""Maximum number of slices of one image. Each slice costs as much as another image."""
USUAL_SCANS = 12
MAX_SCANNED_PIXELS = USUAL_SCANS * MAX_PIXELS
"""Upper bound of a JPEG's pixels times its scans. Each scan is a pass over all pixels but may have
only a few bytes, so a small file could occupy a decoder for hours. Progressive files usually have
about ten scans."""
MAX_SCALED_AREAS = 8
"""Maximum number of patches of one tile, as a multiple of the patches of a square tile. Only narrow
strips would have more."""


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


@dataclass(frozen=True)
class Plan:
    """The sizes to which an image is scaled. Every side is a multiple of the patch size."""

    source: Size
    grid: Grid | None = None
    refined: Size = (0, 0)
    """Size of the scaled image that is cut into slices; (0, 0) without a grid."""


@dataclass(frozen=True)
class PlannedImage:
    """An encoded image that was judged by its header. `plan` says how it is scaled and cut.

    `scans` is the number of passes over all pixels in which the image is decoded.
    """

    data: bytes
    size: Size
    scans: int
    plan: Plan

    @property
    def pixels(self) -> int:
        """The number of pixels to decode."""
        return math.prod(self.size)


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
    return prepare_planned(rules, plan_image(rules, data, max_slices, max_pixels))


def plan_image(
    rules: ImageRules,
    data: bytes,
    max_slices: int | None = None,
    max_pixels: int = MAX_PIXELS,
) -> PlannedImage:
    """Judge an encoded image by its header, as `prepare` does. No pixel is decoded."""
    with _opened(data, max_pixels) as image:
        scans = _scan_count(image, data)
        return PlannedImage(data, image.size, scans, _plan(rules, image.size, max_slices))


def prepare_planned(rules: ImageRules, image: PlannedImage) -> PreparedImage:
    """Decode, scale and cut an image. Raises `ImageError` if its pixels cannot be decoded."""
    picture = decode_image(image.data, image.pixels)
    if picture.size != image.size:  # its decoder has found another size than its header states
        raise ImageError("the image cannot be decoded")
    return _prepared(rules, picture, image.plan)


def prepare_picture(
    rules: ImageRules, picture: Image.Image, max_slices: int | None = None
) -> PreparedImage:
    """Scale and cut a decoded RGB image, as `prepare` does."""
    return _prepared(rules, picture, _plan(rules, picture.size, max_slices))


def decode_image(data: bytes, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Decode an image of one of `FORMATS` to RGB; raises `ImageError`.

    As in the reference, an alpha channel is dropped, a palette is applied and the EXIF orientation
    is ignored. For 16-bit grey the upper 8 bits are used, whereas the reference clips values to
    white. For an animation the first frame is used.
    """
    with _opened(data, max_pixels) as image:
        image.load()
        return _to_rgb(image)


@contextmanager
def _opened(data: bytes, max_pixels: int) -> Generator[Image.Image]:
    """Open an image and read its header. Errors of the block become `ImageError`, too."""
    if not data:
        raise ImageError("the image is empty")
    try:
        with Image.open(BytesIO(data), formats=FORMATS) as opened:
            _check_cost(opened, data, max_pixels)
            yield opened
    except ImageError:
        raise
    except UnidentifiedImageError as error:
        raise ImageError("the image is no readable JPEG, PNG, WEBP, GIF or BMP") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageError(f"the image has more than {MAX_PIXELS} pixels") from error
    except Exception as error:  # decoders raise many types for hostile bytes
        raise ImageError("the image cannot be decoded") from error


def _plan(rules: ImageRules, size: Size, max_slices: int | None) -> Plan:
    allowed = rules.max_slices if max_slices is None else max_slices
    if not 1 <= allowed <= MAX_SLICES:
        raise ImageError(f"max_slices is {allowed}, not between 1 and {MAX_SLICES}")
    return plan_sizes(rules, size, allowed)


def _prepared(rules: ImageRules, picture: Image.Image, plan: Plan) -> PreparedImage:
    tiles = tuple(_tile(rules, image) for image in _cut(rules, picture, plan))
    return PreparedImage(tiles, plan.grid, picture.size)


def plan_sizes(rules: ImageRules, size: Size, max_slices: int) -> Plan:
    """Choose the scaled size of an image, and its slices.

    Raises `ImageError` for an image so narrow that its tiles would have too many patches.
    """
    patch = rules.patch_size
    if not rules.is_scaled:
        plan = Plan(source=(size[0] // patch * patch, size[1] // patch * patch))
    else:
        grid = slice_grid(rules, size, max_slices)
        if grid is None:
            plan = Plan(source=_scaled(rules, size))
        else:
            plan = Plan(_scaled(rules, size), grid, _refined(rules, size, grid))
    columns, rows = plan.grid or (1, 1)
    largest = max(math.prod(plan.source), math.prod(plan.refined) // (columns * rows))
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


def _check_cost(opened: Image.Image, data: bytes, max_pixels: int) -> None:
    """Refuse an image whose decoding would take too long. So far, only its header was read."""
    width, height = opened.size
    if width * height > max_pixels:
        raise ImageError(f"the image has {width} x {height} pixels, more than {max_pixels}")
    scans = _scan_count(opened, data)
    if scans * width * height > MAX_SCANNED_PIXELS:
        raise ImageError(f"the image has {scans} scans of {width} x {height} pixels, too many")


def _scan_count(opened: Image.Image, data: bytes) -> int:
    """Count the passes over the pixels. Only a JPEG may have more than one."""
    if opened.format in FORMATS[1:]:
        return 1
    # Each scan begins with this marker, which entropy-coded data never contains. An embedded
    # thumbnail may contain it too, but that is rare.
    return max(1, data.count(b"\xff\xda"))


def _to_rgb(image: Image.Image) -> Image.Image:
    """Convert to RGB; transparency is ignored."""
    image.info.pop("transparency", None)
    if image.mode.startswith("I"):  # 16-bit grey, which `convert` would clip
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    return image.convert("RGB")


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


def _cut(rules: ImageRules, picture: Image.Image, plan: Plan) -> Iterator[Image.Image]:
    if not rules.is_scaled:
        yield picture.crop((0, 0, *plan.source))
        return
    yield picture.resize(plan.source, Image.Resampling.BICUBIC)
    if plan.grid is None:
        return
    columns, rows = plan.grid
    refined = picture.resize(plan.refined, Image.Resampling.BICUBIC)
    width, height = plan.refined[0] // columns, plan.refined[1] // rows
    for top in range(0, plan.refined[1], height):
        for left in range(0, plan.refined[0], width):
            yield refined.crop((left, top, left + width, top + height))


def _tile(rules: ImageRules, image: Image.Image) -> ImageTile:
    patch = rules.patch_size
    pixels = np.asarray(image)
    rows, columns = pixels.shape[0] // patch, pixels.shape[1] // patch
    patches = pixels.reshape(rows, patch, columns, patch, 3).transpose(0, 2, 4, 1, 3)
    return ImageTile(patches.reshape(rows * columns, 3 * patch**2), rows, columns)


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

    A tile has `rows` embeddings; `marks` are the special tokens around images.
    """

    rules: ImageRules
    marks: ImageMarks
    rows: int

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
        return prepare(self.rules, data, max_slices, max_pixels)

    def plan(
        self, data: bytes, max_slices: int | None = None, max_pixels: int = MAX_PIXELS
    ) -> PlannedImage:
        """Judge an encoded image by its header; see the function `plan_image`."""
        return plan_image(self.rules, data, max_slices, max_pixels)

    def prepare_planned(self, image: PlannedImage) -> PreparedImage:
        """Decode and cut an image; see the function `prepare_planned`."""
        return prepare_planned(self.rules, image)

    def prepare_picture(self, picture: Image.Image, max_slices: int | None = None) -> PreparedImage:
        """Cut a decoded RGB image; see the function `prepare_picture`."""
        return prepare_picture(self.rules, picture, max_slices)
