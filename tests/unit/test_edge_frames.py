"""The size of a picture, from its header alone, whatever the bytes are."""

from __future__ import annotations

import io

import pytest
from edge_transcripts import jpeg, png
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from duplane.edge.dialects.frames import picture_size


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


@given(st.binary(max_size=64), st.sampled_from([b"", b"\xff\xd8", b"\x89PNG\r\n\x1a\n"]))
def test_any_bytes_are_answered(rest: bytes, head: bytes) -> None:
    size = picture_size(head + rest)
    assert size is None or min(size) > 0
