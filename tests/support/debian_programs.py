"""Finds a program, or unpacks the Debian package that has it into the virtual environment."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

_LIMIT_S = 100


def debian_program(name: str, package: str) -> str:
    """Return the path of a program; skip the test where there is none."""
    found = _find(name, package)
    if found is None:
        pytest.skip(f"no {name}: not in PATH, and `apt-get download {package}` does not work here")
    return found


@functools.cache
def _find(name: str, package: str) -> str | None:
    unpacked = _folder(package) / "usr/bin" / name
    if installed := shutil.which(name):
        return installed
    can_unpack = not unpacked.exists() and shutil.which("apt-get") is not None
    if can_unpack and not _unpack(package) and os.geteuid() == 0:
        _runs("apt-get", "update", "-qq")
        _unpack(package)
    return str(unpacked) if unpacked.exists() else None


def _folder(package: str) -> Path:
    return Path(sys.prefix) / package


def _unpack(package: str) -> bool:
    """Unpack the package without installing it, so that no service starts."""
    with tempfile.TemporaryDirectory() as folder:
        if not _runs("apt-get", "download", "-qq", package, folder=folder):
            return False
        (file,) = Path(folder).glob(f"{package}_*.deb")
        content = Path(folder) / "content"
        if not _runs("dpkg-deb", "-x", str(file), str(content)):
            return False
        # Renamed at the end, for test processes that unpack at the same time.
        if not _folder(package).exists():
            shutil.move(content, _folder(package))
    return True


def _runs(*command: str, folder: str | None = None) -> bool:
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, check=False, timeout=_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0
