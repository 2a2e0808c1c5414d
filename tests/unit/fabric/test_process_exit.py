"""The exit status of a process that cannot continue, and its last log line."""

from __future__ import annotations

import subprocess
import sys

import pytest

from duplane.fabric.process import EXIT_CANNOT_START, EXIT_FATAL

PROGRAM = """
import sys, threading
from duplane.fabric import process
from duplane.fabric.monitoring.logs import configure_logging

async def main(shutdown):
    # A thread that never ends and is not a daemon.
    threading.Thread(target=threading.Event().wait).start()
    raise {error}

configure_logging("worker")
sys.exit(process.run(main))
"""


LOST = "('the device is lost')"
FATAL = f"process.FatalError{LOST}"
START = f"process.StartError{LOST}"
IN_GROUPS = f"ExceptionGroup('', [ExceptionGroup('', [{START}])])"


def run(error: str) -> subprocess.CompletedProcess[str]:
    program = PROGRAM.format(error=error)
    if error != FATAL:
        program = program.replace("threading.Thread", "#")
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    ("error", "status"),
    [(FATAL, EXIT_FATAL), (START, EXIT_CANNOT_START), (IN_GROUPS, EXIT_CANNOT_START)],
    ids=["fatal", "start", "start of a part"],
)
def test_a_process_that_cannot_go_on_ends_with_one_line_and_its_status(
    error: str, status: int
) -> None:
    ended = run(error)
    assert ended.returncode == status
    (line,) = ended.stderr.splitlines()
    assert line.endswith("CRITICAL worker the device is lost")
