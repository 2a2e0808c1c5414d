"""Files with secrets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from duplane.fabric import secret_files
from duplane.fabric.secret_files import check_secret_files, read_secret


def secret(folder: Path, content: bytes = b"secret\n", mode: int = 0o600) -> Path:
    path = folder / "token"
    path.write_bytes(content)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o640])
def test_a_secret_is_read_without_the_end_of_its_line(tmp_path: Path, mode: int) -> None:
    assert read_secret(secret(tmp_path, mode=mode), "admin_token_file") == "secret"


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602, 0o666])
def test_a_file_that_other_users_may_read_or_change_is_refused(tmp_path: Path, mode: int) -> None:
    path = secret(tmp_path, mode=mode)
    with pytest.raises(ValueError, match=r"^admin_token_file: other users .* run `chmod 600 "):
        read_secret(path, "admin_token_file")
    with pytest.raises(ValueError, match=r"^tls_key: "):
        check_secret_files(tls_key=path, signing_key=None)


def test_where_the_mode_cannot_be_changed_there_is_only_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = secret(tmp_path, mode=0o644)
    real = os.statvfs(path)

    class ReadOnly:
        f_flag = real.f_flag | os.ST_RDONLY

    monkeypatch.setattr(secret_files.os, "statvfs", lambda _: ReadOnly)
    assert read_secret(path, "admin_token_file") == "secret"
    assert "mounted read-only" in caplog.text
    assert "secret\n" not in caplog.text


@pytest.mark.parametrize("content", [b"", b" \n", b"\xff\xfe", b"x" * 5000])
def test_a_file_without_a_usable_secret_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ValueError, match=r"^admin_token_file: "):
        read_secret(secret(tmp_path, content), "admin_token_file")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^admin_token_file: .*missing"):
        read_secret(tmp_path / "missing", "admin_token_file")
