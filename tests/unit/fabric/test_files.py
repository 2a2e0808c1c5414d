"""Atomic writes: the old content stays until the new one is complete."""

from __future__ import annotations

from pathlib import Path

import pytest

from duplane.fabric.files import PART_SUFFIX, part_path, replacing, write_atomically


def test_content_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "index.json"
    write_atomically(path, b"old")
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_old_content_is_read_until_the_new_one_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "index.json"
    path.write_bytes(b"old")
    with replacing(path) as part:
        part.write_bytes(b"half")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"half"


def test_old_content_stays_after_an_error(tmp_path: Path) -> None:
    path = tmp_path / "index.json"
    path.write_bytes(b"old")

    def fail() -> None:
        with replacing(path) as part:
            part.write_bytes(b"half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_two_writers_do_not_share_a_part(tmp_path: Path) -> None:
    parts = {part_path(tmp_path / "a") for _ in range(2)}
    assert len(parts) == 2
    assert all(part.name.startswith(".a.") and part.suffix == PART_SUFFIX for part in parts)
