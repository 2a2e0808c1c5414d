"""Runs a process: event loop, signals, the ready line, signs of life for the parent process.

The process ends when its parent process dies.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import select
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator

import uvloop

READY = "duplane-ready"  # first word of the line that announces the served address
# Set by a parent process: end the process when its stdin ends, and write the line ALIVE to stdout
# each ALIVE_S.
SUPERVISED = "DUPLANE_SUPERVISED"
ALIVE = "duplane-alive"
ALIVE_S = 1.0
EXIT_CANNOT_START = 1
EXIT_FATAL = 70
EXIT_INTERRUPTED = 130

_log = logging.getLogger(__name__)


class StartError(Exception):
    """A process cannot start with its settings. The message explains this to the operator."""


class FatalError(Exception):
    """A running process cannot continue. The message has the cause."""


class Shutdown:
    """The request to end this process.

    The first SIGINT or SIGTERM requests a drain; the second cancels the main task. Later signals
    change nothing, so that they do not interrupt the cleanup.
    """

    def __init__(self) -> None:
        self._drain = asyncio.Event()

    @property
    def is_draining(self) -> bool:
        """True once a drain is requested."""
        return self._drain.is_set()

    def drain(self) -> None:
        """Request a drain."""
        self._drain.set()

    async def wait(self) -> None:
        """Wait until a drain is requested."""
        await self._drain.wait()


def run(main: Callable[[Shutdown], Coroutine[None, None, None]]) -> int:
    """Run `main` on uvloop until it returns; return the exit code.

    The process and those that it starts write no core dumps, which would contain sound, text, keys
    and tokens.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        uvloop.run(_supervise(main))
    except (KeyboardInterrupt, asyncio.CancelledError):
        return EXIT_INTERRUPTED
    except StartError as error:
        _log.critical("%s", error)
        return EXIT_CANNOT_START
    except ExceptionGroup as group:  # from a process that starts its parts in tasks
        failures, others = group.split(StartError)
        if others or failures is None:
            raise
        for failure in _leaves(failures):
            _log.critical("%s", failure)
        return EXIT_CANNOT_START
    except FatalError as error:
        _log.critical("%s", error)
        logging.shutdown()
        os._exit(EXIT_FATAL)  # a stuck driver must not keep the interpreter from ending
    return 0


def _leaves(group: ExceptionGroup[StartError]) -> Iterator[StartError]:
    for failure in group.exceptions:
        if isinstance(failure, ExceptionGroup):
            yield from _leaves(failure)
        else:
            yield failure


async def _supervise(main: Callable[[Shutdown], Coroutine[None, None, None]]) -> None:
    loop = asyncio.get_running_loop()
    shutdown = Shutdown()
    task = asyncio.create_task(main(shutdown))
    is_signalled = False  # a drain may also be requested without a signal

    def on_signal() -> None:
        nonlocal is_signalled
        if not is_signalled:
            is_signalled = True
            shutdown.drain()
        elif not task.cancelling():
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    if not os.environ.get(SUPERVISED):
        await task
        return
    await _watch_parent(task)
    showing = asyncio.create_task(_show_life())
    try:
        await task
    finally:
        showing.cancel()


async def _watch_parent(task: asyncio.Task[None]) -> None:
    """Cancel `task` when stdin ends, which means that the parent has died."""

    class _Tie(asyncio.Protocol):
        def connection_lost(self, exc: Exception | None) -> None:
            del exc
            if not (task.done() or task.cancelling()):
                _log.warning("the supervising process is gone; stopping")
                task.cancel()

    await asyncio.get_running_loop().connect_read_pipe(_Tie, sys.stdin)


async def _show_life() -> None:
    """Write the line ALIVE until cancelled. A process whose event loop hangs, or that is frozen,
    writes none.
    """
    stdout = sys.stdout.fileno()
    while True:
        _, writable, _ = select.select((), (stdout,), (), 0)
        if writable:  # else the parent does not read, and a write could wait
            os.write(stdout, f"{ALIVE}\n".encode())
        await asyncio.sleep(ALIVE_S)


def announce(role: str, address: str) -> None:
    """Print the ready line, which says that `role` serves at `address`.

    Garbage collections examine only objects that are made from now on. The other objects (modules,
    the model) stay until the process ends, and examining them would take tens of milliseconds.
    """
    gc.collect()
    gc.freeze()
    sys.stdout.write(f"{READY} {role} {address}\n")
    sys.stdout.flush()
