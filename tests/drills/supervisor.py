"""The commands `start NAME...` and `stop NAME...` of a drill, for the processes of one folder.

`NAME.json` has the command of a process, `NAME.pid` the process that runs, `NAME.log` its output.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import orjson
import psutil

TESTS = Path(__file__).parents[1]
_STOP_S = 60.0


def define(folder: Path, name: str, command: Sequence[str]) -> None:
    """Say what `start NAME` runs."""
    (folder / f"{name}.json").write_bytes(orjson.dumps(command))


def process(folder: Path, name: str) -> psutil.Process | None:
    """Return the running process of this name."""
    with contextlib.suppress(FileNotFoundError, psutil.NoSuchProcess):
        found = psutil.Process(int((folder / f"{name}.pid").read_text()))
        if found.status() != psutil.STATUS_ZOMBIE:
            return found
    return None


def start(folder: Path, name: str) -> None:
    """Start a process, in a session of its own, unless it runs."""
    if process(folder, name):
        return
    command = orjson.loads((folder / f"{name}.json").read_bytes())
    with (folder / f"{name}.log").open("ab") as log:
        started = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    (folder / f"{name}.pid").write_text(str(started.pid))


def stop(folder: Path, name: str) -> None:
    """Ask a process to end, and wait until it has ended."""
    if found := process(folder, name):
        found.terminate()
        _wait(folder, name)


def kill(folder: Path, name: str) -> None:
    """End a process at once, also if it is frozen."""
    if found := process(folder, name):
        found.kill()
        _wait(folder, name)


def _wait(folder: Path, name: str) -> None:
    """Wait until a process has ended, which may not be a child of this one."""
    deadline_s = time.monotonic() + _STOP_S
    while process(folder, name):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{name} has not ended within {_STOP_S:g} s")
        time.sleep(0.02)


def start_all(folder: Path, names: Sequence[str]) -> None:
    """Start processes that are no children of this one, as a command of a shell would."""
    command = (sys.executable, "-m", __name__, "start", str(folder), *names)
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(TESTS)}, check=True)


def names(folder: Path) -> Sequence[str]:
    """Return the names of all processes."""
    return sorted(path.stem for path in folder.glob("*.json"))


if __name__ == "__main__":
    for _name in sys.argv[3:]:
        {"start": start, "stop": stop}[sys.argv[1]](Path(sys.argv[2]), _name)
