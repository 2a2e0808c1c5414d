"""Runs the model in a process of its own, so that no work of a call delays the device thread.

Python runs one thread of a process at a time. In one process, the device thread would wait for the
event loop before each kernel that it launches.

The engine process (`engine_child`) has its own device thread and ends with this process. If it
ends first, the device counts as lost.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

from duplane.worker.engine.engine import JOIN_TIMEOUT_S, Engine
from duplane.worker.engine.events import AnsweredUnit, DroppedUnit, Event, FailedUnit
from duplane.worker.engine.frames import Frames, deliver
from duplane.worker.engine.inbox import Entry
from duplane.worker.engine.slot_channel import Channel
from duplane.worker.engine.unit_record import LaunchRecord
from duplane.worker.models.interface import (
    Device,
    DeviceDescription,
    DeviceLostError,
    LoadError,
    ModelConstants,
)
from duplane.worker.settings import WorkerSettings

_log = logging.getLogger(__name__)

ENGINE_MODULE = "duplane.worker.engine.engine_child"
"""The program of the engine process, as its command line names it."""
# With -P the process imports no modules from the working directory.
_CHILD = (sys.executable, "-P", "-m", ENGINE_MODULE)
# Signals that only the worker handles. A terminal or systemd may send them to both processes.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class RemoteChannel(Channel):
    """A channel whose inbox is in the engine process.

    When it is muted, the entries that have no outcome yet count as dropped, also the one that runs.
    """

    def __init__(self, slot: int, on_event: Callable[[Event], None]) -> None:
        super().__init__(slot, on_event)
        self.waiting_count = 0
        self.is_muted = False
        self.is_clean: asyncio.Future[bool] | None = None

    def expects(self, event: Event) -> bool:
        """Note the outcome of an entry. Return False if it comes too late, after `mute`."""
        if not isinstance(event, AnsweredUnit | FailedUnit | DroppedUnit):
            return True
        if not self.is_muted:
            self.waiting_count -= 1
            self.dropped_count += isinstance(event, DroppedUnit)
        return not self.is_muted


class EngineProcess(Engine[RemoteChannel]):
    """The engine process and its interface.

    Its methods `receive_*` are the messages of that process; see `frames.deliver`.
    """

    def __init__(self, device: Device, settings: WorkerSettings) -> None:
        """Load only the preparer of `device` here. The model of the settings runs there."""
        super().__init__()
        self._device = device
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._channels: dict[int, RemoteChannel] = {}
        self._frames = Frames(partial(deliver, self), self._lose)

    async def _load(self) -> None:
        self._loading: asyncio.Future[None] = self._loop.create_future()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = _start(theirs.fileno())
        await self._loop.create_unix_connection(lambda: self._frames, sock=ours)
        self._frames.send(("start", self._settings))
        preparing = asyncio.to_thread(self._device.load_preparer)
        self._preparer, _ = await asyncio.gather(preparing, self._loading)
        self.busy_since_s = self.busy_since_s or time.monotonic()  # its first sign of life

    async def _stop(self) -> None:
        if self._process is None:
            return
        self._resolve(self.ended, None)
        self._frames.close()  # then the process ends
        if self._is_hung or not self._has_loaded:
            self._process.kill()  # a load or a hung call cannot be interrupted
        code = await asyncio.to_thread(_wait, self._process)
        if self.ended.exception():
            _log.error("the engine process has ended with the exit code %d", code)

    @property
    def process_id(self) -> int:
        """The id of the engine process; 0 before `start`."""
        return self._process.pid if self._process else 0

    def attach(self, slot: int, on_event: Callable[[Event], None]) -> RemoteChannel:
        if slot in self._channels:
            raise ValueError(f"slot {slot} is in use")
        channel = self._channels[slot] = RemoteChannel(slot, on_event)
        self._send(channel, "attach")
        return channel

    def put(self, channel: RemoteChannel, entry: Entry) -> None:
        channel.waiting_count += 1
        super().put(channel, entry)

    def mute(self, channel: RemoteChannel) -> None:
        super().mute(channel)
        channel.is_muted = True
        channel.dropped_count += channel.waiting_count
        channel.waiting_count = 0

    def tell(self, channel: RemoteChannel, method: str, **arguments: object) -> None:
        self._send(channel, "tell", method, arguments)

    async def _close(self, channel: RemoteChannel) -> bool:
        self._send(channel, "close")
        channel.is_clean = self._loop.create_future()
        return await channel.is_clean

    def _send(self, channel: RemoteChannel, name: str, *arguments: object) -> None:
        """Send a message unless its channel is being closed: the slot may have its next channel."""
        if channel.is_clean is None:
            self._frames.send((name, channel.slot, *arguments), channel.slot)

    def receive_loaded(
        self, constants: ModelConstants, description: DeviceDescription, memory_used_bytes: int
    ) -> None:
        """The model has loaded."""
        self.constants, self.description = constants, description
        self.memory_used_bytes = memory_used_bytes
        self._resolve(self._loading, None)

    def receive_event(self, slot: int, event: Event) -> None:
        """An event of a slot has come."""
        channel = self._channels[slot]
        if channel.expects(event):
            self._loop.call_soon(channel.on_event, event)

    def receive_launches(self, records: Sequence[LaunchRecord]) -> None:
        """Launches have ended."""
        self._loop.call_soon(self.on_launches, records)

    def receive_closed(self, slot: int, is_clean: bool, memory_used_bytes: int) -> None:
        """A slot is cleaned. No event of it follows."""
        self.memory_used_bytes = memory_used_bytes
        closed = self._channels.pop(slot).is_clean
        if closed:
            self._resolve(closed, is_clean)

    def receive_alive(self, busy_since_s: float | None) -> None:
        """A sign of life has come. Without a call, it is known until now that there was none."""
        self.busy_since_s = busy_since_s or time.monotonic()

    def receive_log(self, record: logging.LogRecord) -> None:
        """The engine process logs."""
        logger = logging.getLogger(record.name)
        if logger.isEnabledFor(record.levelno):
            logger.handle(record)

    def receive_ended(self, why: str, is_refused: bool) -> None:
        """The model cannot be loaded, or has ended with an error. No other message follows.

        `is_refused`: it cannot be loaded because of the checkpoint or the device.
        """
        if self._loading.done():
            self._lose(why)
        else:
            self._loading.set_exception((LoadError if is_refused else RuntimeError)(why))
            self.ended.set_result(None)

    def _lose(self, why: str = "the engine process has ended") -> None:
        """Note that no model runs any more."""
        self._resolve(self._loading, RuntimeError(why))
        self._resolve(self.ended, DeviceLostError(why))


def _start(socket_number: int) -> subprocess.Popen[bytes]:
    """Start the engine process with its end of the socketpair. It never gets `_SIGNALS`."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:  # a process that is started inherits the blocked signals
        return subprocess.Popen(
            (*_CHILD, str(socket_number)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(socket_number,),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Wait for the end of a process; kill it if it does not end. Return its exit code."""
    try:
        return process.wait(JOIN_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
