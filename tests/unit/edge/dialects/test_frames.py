"""The size of a picture is read from its header alone; arbitrary bytes cause no exception."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from support.protocols.transcripts import jpeg, png

from duplane.edge.payload.pictures import picture_size


@pytest.mark.parametrize("form", ["JPEG", "PNG"])
@pytest.mark.parametrize("is_progressive", [False, True])
def test_real_files_tell_their_size(form: str, is_progressive: bool) -> None:
    file = io.BytesIO()
    Image.new("RGB", (321, 45)).save(
        file, form, progressive=is_progressive, comment=b"x" * 300, dpi=(72, 72)
    )
    assert picture_size(file.getvalue()) == (321, 45)


@pytest.mark.parametrize("make", [jpeg, png])
def test_a_file_that_is_cut_before_its_size_tells_none(make) -> None:
    whole = make(7, 8)
    assert picture_size(whole) == (7, 8)
    assert picture_size(whole[:12]) is None
    assert picture_size(make(0, 8)) is None


@pytest.mark.parametrize("part", [b"\xff\xe1\x00\x02", b"\xff"])
def test_jpeg_of_many_empty_segments_is_not_read_to_its_end(part: bytes) -> None:
    """Reading 2 MiB of them would stop the event loop for half a second."""
    file = io.BytesIO()
    Image.new("RGB", (8, 9)).save(file, "JPEG")
    start, rest = file.getvalue()[:2], file.getvalue()[2:]
    assert picture_size(start + part * 100 + rest) == (8, 9)
    assert picture_size(start + part * 1100 + rest) is None


@given(st.binary(max_size=64), st.sampled_from([b"", b"\xff\xd8", b"\x89PNG\r\n\x1a\n"]))
def test_any_bytes_are_answered(rest: bytes, head: bytes) -> None:
    size = picture_size(head + rest)
    assert size is None or min(size) > 0


@pytest.mark.parametrize("form", ["WEBP", "GIF", "BMP"])
@pytest.mark.parametrize("is_lossless", [False, True])
def test_other_formats_tell_their_size(form: str, is_lossless: bool) -> None:
    file = io.BytesIO()
    options = {"lossless": is_lossless} if form == "WEBP" else {}
    Image.new("RGB", (321, 45)).save(file, form, **options)
    assert picture_size(file.getvalue()) == (321, 45)


def test_an_animated_webp_with_transparency_tells_its_size() -> None:
    file = io.BytesIO()
    pictures = [Image.new("RGBA", (33, 21), (shade, 0, 0, 128)) for shade in (0, 255)]
    pictures[0].save(file, "WEBP", save_all=True, append_images=pictures[1:])
    assert file.getvalue()[12:16] == b"VP8X"
    assert picture_size(file.getvalue()) == (33, 21)
