"""A file of keys is read again when it changes; a bad file changes nothing."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from duplane.edge.credentials.key_file import KeyFile
from duplane.edge.credentials.keys import new_key, parse_tenant_keys
from duplane.fabric.files import replacing


def entry(tenant: str) -> str:
    key = new_key()
    return f'[[keys]]\nid = "{key.key_id}"\nsha256 = "{key.digest}"\ntenant = "{tenant}"\n'


def write(path: Path, text: str, mode: int = 0o600) -> None:
    with replacing(path) as part:
        part.write_text(text)
        part.chmod(mode)


def opened(path: Path) -> KeyFile:
    return KeyFile(path, "api_keys", parse_tenant_keys, lambda: 0.0)


def test_changed_file_is_read_and_an_unchanged_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    write(path, entry("a"))
    file = opened(path)
    assert set(file.ring.tenants) == {"a"}
    assert not file.reload_if_changed()
    write(path, entry("b"))
    assert file.reload_if_changed()
    assert set(file.ring.tenants) == {"b"}
    assert file.reload()


@pytest.mark.parametrize("bad", ["", "[[keys]]", "\0"])
def test_bad_file_leaves_the_old_keys_and_is_logged_once(
    bad: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="duplane")
    path = tmp_path / "keys.toml"
    write(path, entry("a"))
    file = opened(path)
    write(path, bad)
    assert not file.reload_if_changed()
    assert not file.reload_if_changed()
    path.unlink()
    assert not file.reload_if_changed()
    assert set(file.ring.tenants) == {"a"}
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert all(text.startswith(f"the old keys stay: api_keys: {path}") for text in said)
    write(path, entry("b"))
    assert file.reload_if_changed()


def test_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    write(path, entry("a"), mode=0o644)
    with pytest.raises(ValueError, match="api_keys: other users may read"):
        opened(path)
    write(path, entry("a"))
    file = opened(path)
    path.chmod(0o604)
    assert not file.reload_if_changed()
    assert set(file.ring.tenants) == {"a"}


def test_file_that_is_too_long_or_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    write(path, "#" * (4 * 1024 * 1024 + 1))
    with pytest.raises(ValueError, match="more than"):
        opened(path)
    with replacing(path) as part:
        part.write_bytes(b"\xff")
        part.chmod(0o600)
    with pytest.raises(ValueError, match="not UTF-8"):
        opened(path)
