"""`duplane up`: starts one process per role and keeps them running until told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncGenerator, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from duplane.fabric import process

_log = logging.getLogger(__name__)

_READY_TIMEOUT_S = 300.0  # a large checkpoint takes a while to load
_STOP_TIMEOUT_S = 15.0  # after the second signal, before SIGKILL
_RESTART_DELAY_S = 0.5
_MAX_FAST_FAILURES = 5  # deaths in a row, each before its role was ready, until we give up


@dataclass(frozen=True)
class UpSettings:
    """Everything `duplane up` can be told."""

    host: str = "127.0.0.1"
    port: int = 0
    worker_count: int = 1
    slot_count: int = 4
    checkpoint: Path | None = None
    devices: tuple[str, ...] = ("cpu",)
    dtype: str = "float32"
    tls_cert: Path | None = None
    tls_key: Path | None = None
    log_level: str = "INFO"


class RoleFailed(Exception):  # noqa: N818  # reads as what happened
    """A role did not come up."""


@dataclass
class Role:
    """One process that is kept running: started again when it dies."""

    name: str
    arguments: Sequence[str]
    address: str  # where to serve; port 0 until it has told which one it got
    _process: asyncio.subprocess.Process | None = None
    _ready: asyncio.Event = field(default_factory=asyncio.Event)
    _has_served: bool = False
    _is_stopping: bool = False

    @property
    def process_id(self) -> int:
        """Of the process that runs now. Raises ValueError while none does."""
        if self._process is None:
            raise ValueError(f"{self.name} does not run")
        return self._process.pid

    async def keep_running(self) -> None:
        """Start, watch, start again; returns after `stop`, raises RoleFailed on a bad start."""
        failures = 0
        while not self._is_stopping:
            code = await self._run_once()
            if self._is_stopping:
                return
            failures = 0 if self._ready.is_set() else failures + 1
            if failures >= _MAX_FAST_FAILURES or not self._has_served:
                raise RoleFailed(f"{self.name} does not start (exit code {code})")
            _log.error("%s ended with exit code %s; starting it again", self.name, code)
            self._ready.clear()
            await asyncio.sleep(_RESTART_DELAY_S)

    async def _run_once(self) -> int:
        running = self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "duplane.tools", *self.arguments),
            # Where it served once it must serve again: the others know that address.
            *("--listen", self.address),
            stdin=asyncio.subprocess.PIPE,  # its end tells the role that we are gone
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, process.SUPERVISED: "1"},
            start_new_session=True,  # Ctrl-C is for us; the roles are told by us, in order
        )
        try:
            assert running.stdout
            async for line in running.stdout:
                self._heard(line.decode(errors="replace").rstrip())
            return await running.wait()
        finally:
            if running.returncode is None:
                running.kill()
                await running.wait()

    def _heard(self, line: str) -> None:
        match line.split():
            case [process.READY, _, address]:
                self.address = address
                self._has_served = True
                self._ready.set()
            case _:
                _log.info("%s: %s", self.name, line)

    async def ready(self) -> str:
        """Wait until it serves; return its address."""
        try:
            async with asyncio.timeout(_READY_TIMEOUT_S):
                await self._ready.wait()
        except TimeoutError:
            raise RoleFailed(f"{self.name} is not ready after {_READY_TIMEOUT_S:g} s") from None
        return self.address

    async def drain(self) -> None:
        """Ask it to end by itself and wait until it has."""
        self._is_stopping = True
        if self._process and self._process.returncode is None:
            self._process.terminate()
            await self._process.wait()

    async def stop(self) -> None:
        """Make it end now: ask once more, then kill."""
        self._is_stopping = True
        running = self._process
        if running is None or running.returncode is not None:
            return
        # Two signals mean at once; two different ones, since equal ones may arrive as one.
        running.terminate()
        running.send_signal(signal.SIGINT)
        try:
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await running.wait()
        except TimeoutError:
            _log.error("%s does not stop; killing it", self.name)
            running.kill()
            await running.wait()


def serve_up(settings: UpSettings) -> int:
    """Run until stopped; return the exit code."""
    try:
        return process.run(lambda shutdown: _up(settings, shutdown))
    except ExceptionGroup as failures:
        ours, others = failures.split(RoleFailed)
        if others or not ours:
            raise
        for failure in ours.exceptions:
            _log.error("%s", failure)  # the message says it all
        return 1


@dataclass(frozen=True)
class Fabric:
    """A fabric that runs: where it serves, and its roles in the order in which they drain."""

    edge: str
    scheduler: str
    roles: Sequence[Role]


async def _up(settings: UpSettings, shutdown: process.Shutdown) -> None:
    _check_port(settings)
    async with running(settings) as fabric:
        tiny = "; tiny random model, its answers mean nothing"
        s = "s" if settings.tls_cert else ""
        sys.stdout.write(
            f"duplane is ready: ws{s}://{fabric.edge}/v1/realtime?mode=audio"
            f" http{s}://{fabric.edge}/status grpc://{fabric.scheduler}"
            f" ({settings.worker_count * settings.slot_count} slots"
            f"{tiny if settings.checkpoint is None else ''})\n"
        )
        sys.stdout.flush()
        await shutdown.wait()
        _log.info("draining: running sessions may end; Ctrl-C again stops at once")
        for role in fabric.roles:
            await role.drain()


@contextlib.contextmanager
def _checkpoint(settings: UpSettings) -> Generator[Path]:
    """Lend the directory of the checkpoint; the tiny default lives as long as we do."""
    if settings.checkpoint:
        yield settings.checkpoint
        return
    from duplane.tools.tiny import build_tiny

    with tempfile.TemporaryDirectory(prefix="duplane-tiny-") as directory:
        build_tiny(Path(directory))
        yield Path(directory)


def _check_port(settings: UpSettings) -> None:
    """Find a taken port before anything is built or loaded. Raises StartError."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.host.strip("[]"), settings.port))
        except OSError as error:
            raise process.StartError(
                f"cannot listen on {settings.host}:{settings.port}: {error.strerror}"
            ) from None


@contextlib.asynccontextmanager
async def running(settings: UpSettings) -> AsyncGenerator[Fabric]:
    """Run scheduler, workers and edge for the body of the `with`. Raises RoleFailed in a group."""
    log = ("--log-level", settings.log_level)
    async with contextlib.AsyncExitStack() as stack:
        checkpoint = stack.enter_context(_checkpoint(settings))
        tasks = await stack.enter_async_context(asyncio.TaskGroup())

        def start(name: str, *arguments: str, address: str = "127.0.0.1:0") -> Role:
            role = Role(name, (name, *arguments, *log), address)
            stack.push_async_callback(role.stop)
            tasks.create_task(role.keep_running(), name=name)
            return role

        scheduler = start("scheduler")
        at = ("--scheduler", await scheduler.ready())
        flags = ("--checkpoint", str(checkpoint), "--slots", str(settings.slot_count))
        workers: list[Role] = []
        for index in range(settings.worker_count):
            device = settings.devices[index % len(settings.devices)]
            place = ("--device", device, "--dtype", settings.dtype)
            workers.append(start("worker", *at, *flags, *place))
        for worker in workers:
            await worker.ready()
        tls = ("--tls-cert", str(settings.tls_cert), "--tls-key", str(settings.tls_key))
        edge = start(
            "edge",
            *at,
            *(tls if settings.tls_cert else ()),
            address=f"{settings.host}:{settings.port}",
        )
        yield Fabric(await edge.ready(), scheduler.address, (edge, *workers, scheduler))
