"""Reads the header of an image, decodes it, scales it, and cuts it into patches as a plan says.

`preprocessing` makes the plans. A decoder process runs this module too, so it imports no torch.
Source: `MiniCPMO45/processing_minicpmo.py` of OpenBMB/MiniCPM-o-Demo@28b60cf.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO

import numpy as np
from PIL import Image, UnidentifiedImageError

from duplane.worker.models.minicpm_o.types import Grid, ImageTile, PreparedImage, Size
from duplane.worker.models.types import ImageError

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")

MAX_PIXELS = 1 << 25
"""Maximum number of pixels of an encoded image; a larger image is refused before it is decoded."""
USUAL_SCANS = 12
MAX_SCANNED_PIXELS = USUAL_SCANS * MAX_PIXELS
"""Upper bound of a JPEG's pixels times its scans. Each scan is a pass over all pixels but may have
only a few bytes, so a small file could occupy a decoder for hours. Progressive files usually have
about ten scans."""

MAX_HEADER_READS = 1024
"""Maximum number of segments before the size of a JPEG, and of reads of the header of another file.
They are read in Python, which stops the other threads: a file of tiny parts would take seconds.
The headers of usual files have some dozens of parts."""

_WEBP_HEAD_BYTES = 30
_PNG = b"\x89PNG\r\n\x1a\n"
_PNG_HEAD_BYTES = 33
_JPEG = b"\xff\xd8"
# Markers of JPEG (ITU T.81, table B.1): those before a size, and those without a segment.
_FRAME_STARTS = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})
_STANDALONE = frozenset({0x01, *range(0xD0, 0xD8)})


@dataclass(frozen=True)
class Plan:
    """How an image is scaled and cut. Every side is a multiple of `patch`, the side of a patch."""

    source: Size
    patch: int
    grid: Grid | None = None
    refined: Size = (0, 0)
    """Size of the scaled image that is cut into slices; (0, 0) without a grid."""
    is_scaled: bool = True
    """False means that the image is cropped to `source`."""

    @property
    def tile_sizes(self) -> list[Size]:
        """The sizes in pixels of the tiles: the whole image, then its slices."""
        if self.grid is None:
            return [self.source]
        columns, rows = self.grid
        slice_size = self.refined[0] // columns, self.refined[1] // rows
        return [self.source, *[slice_size] * (columns * rows)]


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


def read_header(data: bytes, max_pixels: int = MAX_PIXELS) -> tuple[Size, int]:
    """Return the size of an image and the number of its scans. Raises `ImageError`.

    This module reads the sizes of WEBP, PNG and JPEG files itself: Pillow would use a decoder in C
    for the first, and read profiles, texts and thousands of tags beside the sizes of the others. It
    reads the headers of the other formats in Python. So no header reaches a decoder in C.
    """
    if size := _own_size(data):
        scans = _scan_count("JPEG", data) if data.startswith(_JPEG) else 1
        _check_cost(size, scans, max_pixels)
        return size, scans
    with _opened(data, max_pixels, _Header(data)) as image:
        return image.size, _scan_count(image.format, data)


def decode_planned(image: PlannedImage) -> PreparedImage:
    """Decode, scale and cut an image. Raises `ImageError` if its pixels cannot be decoded."""
    picture = decode_image(image.data, image.pixels)
    if picture.size != image.size:  # its decoder has found another size than its header states
        raise ImageError("the image cannot be decoded")
    return cut_picture(picture, image.plan)


def decode_image(data: bytes, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Decode an image of one of `FORMATS` to RGB; raises `ImageError`.

    As in the reference, an alpha channel is dropped, a palette is applied and the EXIF orientation
    is ignored. For 16-bit grey the upper 8 bits are used, whereas the reference clips values to
    white. For an animation the first frame is used.
    """
    with _opened(data, max_pixels) as image:
        image.load()
        return _to_rgb(image)


def cut_picture(picture: Image.Image, plan: Plan) -> PreparedImage:
    """Scale and cut a decoded RGB image."""
    tiles = tuple(_tile(image, plan.patch) for image in _cut(picture, plan))
    return PreparedImage(tiles, plan.grid, picture.size)


class _Header(BytesIO):
    """A file of which only the header is read."""

    _read_count = 0

    def read(self, size: int | None = -1, /) -> bytes:
        """Read bytes. Raises `ImageError` after too many reads."""
        self._read_count += 1
        if self._read_count > MAX_HEADER_READS:
            raise _too_many_parts()
        return super().read(size)


@contextmanager
def _opened(data: bytes, max_pixels: int, file: BytesIO | None = None) -> Generator[Image.Image]:
    """Open an image and read its header. Errors of the block become `ImageError`, too.

    `file` reads `data`.
    """
    if not data:
        raise ImageError("the image is empty")
    try:
        with Image.open(file or BytesIO(data), formats=FORMATS) as opened:
            _check_cost(opened.size, _scan_count(opened.format, data), max_pixels)
            yield opened
    except ImageError:
        raise
    except UnidentifiedImageError as error:
        raise _unreadable() from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageError(f"the image has more than {MAX_PIXELS} pixels") from error
    except Exception as error:  # decoders raise many types for hostile bytes
        raise ImageError("the image cannot be decoded") from error


def _unreadable() -> ImageError:
    return ImageError("the image is no readable JPEG, PNG, WEBP, GIF or BMP")


def _check_cost(size: Size, scans: int, max_pixels: int) -> None:
    """Refuse an image whose decoding would take too long. So far, only its header was read."""
    width, height = size
    if width * height > max_pixels:
        raise ImageError(f"the image has {width} x {height} pixels, more than {max_pixels}")
    if scans * width * height > MAX_SCANNED_PIXELS:
        raise ImageError(f"the image has {scans} scans of {width} x {height} pixels, too many")


def _scan_count(kind: str | None, data: bytes) -> int:
    """Count the passes over the pixels. Only a JPEG may have more than one."""
    if kind in FORMATS[1:]:
        return 1
    # Each scan begins with this marker, which entropy-coded data never contains. An embedded
    # thumbnail may contain it too, but that is rare.
    return max(1, data.count(b"\xff\xda"))


def _own_size(data: bytes) -> Size | None:
    """Return the size of a WEBP, PNG or JPEG file; None for others. Raises `ImageError`."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return _webp_size(data)
    if data.startswith(_PNG):
        size = int.from_bytes(data[16:20]), int.from_bytes(data[20:24])
        is_whole = data[12:16] == b"IHDR" and len(data) >= _PNG_HEAD_BYTES
    elif data.startswith(_JPEG):
        size = _jpeg_size(data)
        is_whole = True
    else:
        return None
    if not (is_whole and min(size)):
        raise _unreadable()
    return size


def _jpeg_size(data: bytes) -> Size:
    """Return the size from the first segment with a size; zeros if there is none."""
    at = 2
    for _ in range(MAX_HEADER_READS):
        if at + 9 > len(data) or data[at] != 0xFF:
            return 0, 0
        marker = data[at + 1]
        if marker in _FRAME_STARTS:
            return int.from_bytes(data[at + 7 : at + 9]), int.from_bytes(data[at + 5 : at + 7])
        if marker == 0xFF:  # padding
            at += 1
        elif marker in _STANDALONE:
            at += 2
        else:
            at += 2 + max(2, int.from_bytes(data[at + 2 : at + 4]))
    raise _too_many_parts()


def _too_many_parts() -> ImageError:
    return ImageError("the header of the image has too many parts")


def _webp_size(data: bytes) -> Size:
    """Return the size from the first chunk of a WEBP file (RFC 9649, 2.5 to 2.7)."""

    def little(start: int, stop: int) -> int:
        return int.from_bytes(data[start:stop], "little")

    kind = data[12:16] if len(data) >= _WEBP_HEAD_BYTES else b""
    size = (0, 0)
    if kind == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        size = little(26, 28) & 0x3FFF, little(28, 30) & 0x3FFF
    elif kind == b"VP8L" and data[20] == 0x2F:
        bits = little(21, 25)
        size = 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    elif kind == b"VP8X":
        size = 1 + little(24, 27), 1 + little(27, 30)
    if not min(size):
        raise _unreadable()
    return size


def _to_rgb(image: Image.Image) -> Image.Image:
    """Convert to RGB; transparency is ignored."""
    image.info.pop("transparency", None)
    if image.mode.startswith("I"):  # 16-bit grey, which `convert` would clip
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    return image.convert("RGB")


def _cut(picture: Image.Image, plan: Plan) -> Iterator[Image.Image]:
    if not plan.is_scaled:
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


def _tile(image: Image.Image, patch: int) -> ImageTile:
    pixels = np.asarray(image)
    rows, columns = pixels.shape[0] // patch, pixels.shape[1] // patch
    patches = pixels.reshape(rows, patch, columns, patch, 3).transpose(0, 2, 4, 1, 3)
    return ImageTile(patches.reshape(rows * columns, 3 * patch**2), rows, columns)
