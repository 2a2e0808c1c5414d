"""The end of a process: by signals, or because it cannot continue."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from duplane.fabric.process import EXIT_CANNOT_START, EXIT_FATAL, EXIT_INTERRUPTED

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


CLEANUP = """
import asyncio, sys
from duplane.fabric import process

async def main(shutdown):
    print("runs", flush=True)
    try:
        await shutdown.wait()
        print("drains", flush=True)
        await asyncio.Event().wait()
    finally:
        print("cleans up", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        print("is clean", flush=True)

sys.exit(process.run(main))
"""


def test_signals_after_the_second_do_not_interrupt_the_cleanup() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CLEANUP], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == "runs\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "drains\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "cleans up\n"
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate("continue\n", timeout=60)
    assert output == "is clean\n"
    assert process.returncode == EXIT_INTERRUPTED


STOPPED = """
import asyncio, os, signal, sys
from duplane.fabric import process

async def main(shutdown):
    shutdown.drain()  # an operator stops this process
    is_handled = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGWINCH, is_handled.set)
    for count in (1, 2):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGWINCH)  # handled after the signal before
        await is_handled.wait()
        is_handled.clear()
        print(f"goes on after signal {count}")

sys.exit(process.run(main))
"""


def test_first_signal_does_not_cancel_a_drain_that_an_operator_has_begun() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", STOPPED], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.stdout, ended.returncode) == ("goes on after signal 1\n", EXIT_INTERRUPTED)
