"""Keeps one process of the fabric running: starts it again when it ends or hangs, and drains it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from duplane.fabric import process
from duplane.tools.command import CommandError
from duplane.tools.up.environment import environment_of
from duplane.tools.up.restarts import RestartDelay

_log = logging.getLogger(__name__)

_READY_TIMEOUT_S = 300.0  # a large checkpoint takes minutes to load
_STOP_TIMEOUT_S = 15.0  # from the second signal to SIGKILL
# A process that serves shows that it lives each second. Without a sign for this time it hangs, and
# is killed.
HUNG_S = 15.0
_MAX_FAST_FAILURES = 5  # `up` ends after this many exits in a row before the process was ready


class RoleError(CommandError):
    """A process did not start."""


@dataclass
class Role:
    """One process of the fabric, and its restarts."""

    name: str
    arguments: Sequence[str]
    address: str  # where the process listens; port 0 until it has announced its port
    restart_delay: RestartDelay = field(default_factory=RestartDelay)
    _process: asyncio.subprocess.Process | None = None
    _ready: asyncio.Event = field(default_factory=asyncio.Event)
    _has_served: bool = False
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def process_id(self) -> int:
        """Return the id of the running process. Raises ValueError while there is none."""
        if self._process is None:
            raise ValueError(f"{self.name} does not run")
        return self._process.pid

    async def keep_running(self) -> None:
        """Start the process, and start it again after each exit, until `drain` or `stop`.

        Raises RoleError if the first start fails, or several starts in a row.
        """
        failures = 0
        while not self._stopping.is_set():
            begin = time.monotonic()
            code = await self._run_once()
            if self._stopping.is_set():
                return
            failures = 0 if self._ready.is_set() else failures + 1
            if failures >= _MAX_FAST_FAILURES or not self._has_served:
                raise RoleError(f"{self.name} does not start (exit code {code})")
            self._ready.clear()
            delay_s = self.restart_delay.after_exit(time.monotonic() - begin)
            _log.error(
                "%s ended with exit code %s; starting it again in %g s", self.name, code, delay_s
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self._stopping.wait()

    async def _run_once(self) -> int:
        running = self._process = await asyncio.create_subprocess_exec(
            # -P: files in the working directory are not imported in place of packages.
            *(sys.executable, "-P", "-m", "duplane.tools", *self.arguments),
            # A restart uses the same port, because the other processes keep using it.
            *("--listen", self.address),
            stdin=asyncio.subprocess.PIPE,  # the process ends when this pipe closes
            stdout=asyncio.subprocess.PIPE,
            env=environment_of(self.name),
            # Ctrl-C reaches only `up`, which then drains the processes one after the other.
            start_new_session=True,
        )
        try:
            assert running.stdout, "it was started with a pipe"
            while line := await self._next_line(running.stdout):
                self._on_line(line.decode(errors="replace").rstrip())
            return await running.wait()
        except TimeoutError:
            _log.error("%s hangs: it has shown no sign of life for %g s", self.name, HUNG_S)
            running.kill()
            return await running.wait()
        finally:
            if running.returncode is None:
                running.kill()
                await running.wait()

    async def _next_line(self, stdout: asyncio.StreamReader) -> bytes:
        """Return the next line, empty at the end. Raises TimeoutError if a ready process hangs."""
        async with asyncio.timeout(HUNG_S if self._ready.is_set() else None):
            return await stdout.readline()

    def _on_line(self, line: str) -> None:
        match line.split():
            case [process.ALIVE]:
                pass
            case [process.READY, _, address]:
                self.address = address
                self._has_served = True
                self._ready.set()
            case _:
                _log.info("%s: %s", self.name, line)

    @property
    def is_ready(self) -> bool:
        """True while the process serves."""
        is_running = self._process is not None and self._process.returncode is None
        return is_running and self._ready.is_set()

    async def ready(self) -> str:
        """Wait until the process serves; return its address. Raises RoleError."""
        try:
            async with asyncio.timeout(_READY_TIMEOUT_S):
                await self._ready.wait()
        except TimeoutError:
            raise RoleError(f"{self.name} is not ready after {_READY_TIMEOUT_S:g} s") from None
        return self.address

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, unless it is starting or has ended."""
        if self._process and self._process.returncode is None and self._ready.is_set():
            self._process.send_signal(number)

    async def drain(self) -> None:
        """Ask the process to end when its sessions have ended, and wait until it has ended."""
        self._stopping.set()
        if self._process and self._process.returncode is None:
            self._process.terminate()
            await self._process.wait()

    async def stop(self) -> None:
        """End the process now: send signals, and kill it if it does not end in time."""
        self._stopping.set()
        running = self._process
        if running is None or running.returncode is not None:
            return
        if not self._has_served:
            running.kill()  # it has no sessions, and may be busy loading
            await running.wait()
            return
        # Two signals stop a process immediately. They are different, because the kernel may merge
        # two equal signals into one.
        running.terminate()
        running.send_signal(signal.SIGINT)
        try:
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await running.wait()
        except TimeoutError:
            _log.error("%s does not stop; killing it", self.name)
            running.kill()
            await running.wait()
