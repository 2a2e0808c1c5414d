"""The sources of the former release, to run its processes beside those of this release."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from pathlib import Path

import pytest
from support.paths import ROOT

# The commit whose processes must work together with those of this tree. It changes with each
# release.
FORMER_RELEASE = "2a6b59c7489e2e53c9263c247983aa4c2676ffd6"
_FOLDERS = ("proto", "edge", "scheduler", "worker", "tools")


def former_environment(folder: Path) -> dict[str, str]:
    """Unpack the former release into `folder`; return the environment that runs its processes.

    Skips the test if this is no clone of the repository with its history.
    """
    command = ("git", "-C", str(ROOT), "archive", "--format=tar", FORMER_RELEASE, *_FOLDERS)
    archive = subprocess.run(command, capture_output=True, check=False)
    if archive.returncode:
        pytest.skip(f"the former release is not in this clone: {archive.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as sources:
        sources.extractall(folder, filter="data")
    paths = os.pathsep.join(str(folder / name) for name in _FOLDERS)
    return {**os.environ, "PYTHONPATH": paths}
