"""Finds a program or a library, or unpacks its Debian package into the virtual environment."""

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
    """Return the path of a program; skip the test if it cannot be found or unpacked."""
    found = _find(name, package)
    if found is None:
        pytest.skip(f"no {name}: not in PATH, and `apt-get download {package}` does not work here")
    return found


def debian_library(name: str, package: str) -> str:
    """Return the path of a library that is loaded into programs; skip the test if it is missing."""
    found = _unpacked(f"usr/lib/*/{name}", package)
    if found is None:
        pytest.skip(f"no {name}: `apt-get download {package}` does not work here")
    return found


@functools.cache
def _find(name: str, package: str) -> str | None:
    return shutil.which(name) or _unpacked(f"usr/bin/{name}", package)


@functools.cache
def _unpacked(pattern: str, package: str) -> str | None:
    """Return a file of a package, or None. Unpacks the package if it is not unpacked yet."""

    def found() -> str | None:
        return next((str(path) for path in _folder(package).glob(pattern)), None)

    can_unpack = not found() and shutil.which("apt-get") is not None
    if can_unpack and not _unpack(package) and os.geteuid() == 0:
        _runs("apt-get", "update", "-qq")
        _unpack(package)
    return found()


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
        # The folder gets its name after it is complete, because another test process may look for
        # it or unpack the same package.
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
