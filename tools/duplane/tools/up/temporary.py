"""A temporary directory that is deleted when this process ends, even if it is killed."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path

from duplane.tools.up.environment import environment_without_settings

# A program that waits until the pipe from its owner closes, even if the owner is killed, and then
# deletes the directory.
_DELETE = "import shutil, sys; sys.stdin.read(); shutil.rmtree(sys.argv[1], ignore_errors=True)"


@contextlib.contextmanager
def temporary_directory(prefix: str) -> Generator[Path]:
    """Yield a new directory. A separate process deletes it when this process ends."""
    directory = Path(tempfile.mkdtemp(prefix=prefix))
    with subprocess.Popen(
        [sys.executable, "-c", _DELETE, str(directory)],
        stdin=subprocess.PIPE,
        env=environment_without_settings(),
        start_new_session=True,  # Ctrl-C does not reach it
    ):
        yield directory
