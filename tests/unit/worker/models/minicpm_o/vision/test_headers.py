"""Headers of pictures: the same sizes as those of the decoded pictures."""

import math
from contextlib import suppress
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from duplane.worker.models.minicpm_o.vision.pixels import MAX_PIXELS, decode_image, read_header
from duplane.worker.models.types import ImageError


def encode(width: int, height: int, kind: str, **options: Any) -> bytes:
    values = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    file = BytesIO()
    Image.fromarray(values).save(file, kind, **options)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP"])
def test_the_header_of_every_format_has_the_size_of_the_picture(kind: str) -> None:
    for size in ((40, 30), (1, 300), (700, 20)):
        for options in ({}, {"lossless": True}, {"exif": b"Exif\0\0"}):
            file = encode(*size, kind, **options)
            assert read_header(file) == (decode_image(file).size, 1) == (size, 1)


@given(st.binary(max_size=40))
def test_a_webp_header_is_read_or_refused(noise: bytes) -> None:
    for kind in (b"", b"VP8 ", b"VP8L", b"VP8X"):
        with suppress(ImageError):
            size, _ = read_header(b"RIFF\0\0\0\0WEBP" + kind + noise)
            assert 0 < math.prod(size) <= MAX_PIXELS


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_nothing_but_the_size_is_read_of_usual_formats(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pillow would also read the profile and all tags, which can take a second."""
    file = encode(40, 30, kind, exif=b"Exif\0\0", icc_profile=bytes(1000))

    def read(*_: object, **__: object) -> None:
        raise AssertionError("Pillow reads the header")

    monkeypatch.setattr(Image, "open", read)
    assert read_header(file) == ((40, 30), 1)


@given(st.binary(max_size=60))
def test_a_jpeg_or_png_header_is_read_or_refused(noise: bytes) -> None:
    for start in (b"\xff\xd8", b"\xff\xd8\xff\xc0", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"):
        with suppress(ImageError):
            size, _ = read_header(start + noise)
            assert 0 < math.prod(size) <= MAX_PIXELS
