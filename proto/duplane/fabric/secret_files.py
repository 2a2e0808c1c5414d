"""Checks that files with secrets can be read only by those who need them.

All functions raise ValueError with a message that begins with the name of the setting.
"""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

_log = logging.getLogger(__name__)
_MAX_SECRET_BYTES = 4096
_OTHERS = stat.S_IRWXO


def check_secret_file(path: Path, name: str) -> None:
    """Check that the users of this machine who are not in the file's group cannot read the file.

    On a file system that is mounted read-only the mode cannot be changed, and container platforms
    mount secrets so: there this function only logs a warning.
    """
    try:
        mode = path.stat().st_mode
        is_read_only = bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    except OSError as error:
        raise ValueError(f"{name}: {path}: {error.strerror or error}") from None
    if not mode & _OTHERS:
        return
    problem = f"{name}: other users may read or change {path} (mode {stat.S_IMODE(mode):04o})"
    if not is_read_only:
        raise ValueError(f"{problem}; run `chmod 600 {path}`")
    _log.warning("%s; its file system is mounted read-only", problem)


def check_secret_files(**paths: Path | None) -> None:
    """Check the files of several settings; None for a setting without a file."""
    for name, path in paths.items():
        if path is not None:
            check_secret_file(path, name)


def read_secret(path: Path, name: str) -> str:
    """Return the secret in a file, without white space at both ends."""
    check_secret_file(path, name)
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_SECRET_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{name}: {path}: {error.strerror or error}") from None
    if len(content) > _MAX_SECRET_BYTES:
        raise ValueError(f"{name}: {path} has more than {_MAX_SECRET_BYTES} bytes")
    try:
        secret = content.decode("ascii").strip()
    except UnicodeDecodeError:
        raise ValueError(f"{name}: {path} is not ASCII text") from None
    if not secret:
        raise ValueError(f"{name}: {path} is empty")
    return secret
