"""The engine process: serves `EngineProcess` with a device thread of its own."""

from __future__ import annotations

import asyncio
import copy
import gc
import logging
import socket
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import uvloop

from duplane.worker.engine.device_thread import SWITCH_INTERVAL_S, DeviceThread
from duplane.worker.engine.events import Event
from duplane.worker.engine.frames import Frames, deliver
from duplane.worker.engine.slot_channel import SlotChannel
from duplane.worker.models.families import open_device
from duplane.worker.models.interface import DeviceLostError, LoadError
from duplane.worker.sandbox import end_with_parent, forbid_inspection
from duplane.worker.settings import WorkerSettings

_log = logging.getLogger("duplane.worker.engine.engine_child")  # __name__ is __main__

_SIGNS_OF_LIFE = 8  # in the time after which a call counts as stuck or hung


class _Child:
    """Serves one worker, from its message `start` to the end of the connection.

    Its methods `receive_*` are the messages of the worker; see `frames.deliver`.
    """

    _engine: DeviceThread

    def __init__(self) -> None:
        self._frames = Frames(partial(deliver, self), self._lose)
        loop = asyncio.get_running_loop()
        self._settings: asyncio.Future[WorkerSettings] = loop.create_future()
        self._lost: asyncio.Future[None] = loop.create_future()
        self._channels: dict[int, SlotChannel] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, connection: socket.socket) -> None:
        """Load the model and serve, until the connection is lost or the model has ended."""
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: self._frames, sock=connection)
        settings = await self._settings
        logging.basicConfig(handlers=[_ForwardingHandler(loop, self._frames.send)], level="INFO")
        logging.getLogger("duplane").setLevel(logging.DEBUG)  # the worker knows the level
        logging.captureWarnings(settings.log_format == "json")
        try:
            self._engine = DeviceThread(open_device(settings), settings)
            await self._engine.start()
        except Exception as error:  # noqa: BLE001 - the root of the process; the worker raises it again
            why, is_refused = str(error), isinstance(error, LoadError)
            if not is_refused:
                _log.exception("the model cannot be loaded")
        else:
            engine = self._engine
            engine.on_launches = lambda records: self._frames.send(("launches", records))
            gc.collect()
            gc.freeze()  # as `fabric.process.announce`
            loaded = engine.constants, engine.description, engine.memory_used_bytes
            self._frames.send(("loaded", *loaded))
            why, is_refused = await self._run(settings), False
        await asyncio.sleep(0)  # log records go first
        self._frames.send(("ended", why, is_refused))
        self._frames.close()
        await self._lost

    async def _run(self, settings: WorkerSettings) -> str:
        """Send signs of life until the connection is lost or the model has ended; return why."""
        engine, ends = self._engine, {self._engine.ended, self._lost}
        period_s = min(settings.stuck_after_s, settings.hung_after_s) / _SIGNS_OF_LIFE
        while not any(end.done() for end in ends):
            self._frames.send(("alive", engine.busy_since_s))
            await asyncio.wait(ends, timeout=period_s, return_when=asyncio.FIRST_COMPLETED)
        if self._lost.done():
            await engine.stop()
            return "the worker has ended"
        error = engine.ended.exception()
        if not isinstance(error, DeviceLostError):
            _log.error("the device thread has failed", exc_info=error)
        return str(error)

    def receive_start(self, settings: WorkerSettings) -> None:
        """Load the model of these settings."""
        self._settings.set_result(settings)

    def receive_attach(self, slot: int) -> None:
        """Open the channel to a slot."""

        def post(event: Event) -> None:
            self._frames.send(("event", slot, event), slot)

        self._channels[slot] = self._engine.attach(slot, post)

    def receive_tell(self, slot: int, method: str, arguments: dict[str, Any]) -> None:
        """Call a method of the slot's channel with these arguments."""
        self._engine.tell(self._channels[slot], method, **arguments)

    def receive_close(self, slot: int) -> None:
        """Clean the slot; then answer."""
        task = asyncio.create_task(self._close(self._channels.pop(slot)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _close(self, channel: SlotChannel) -> None:
        slot, is_clean = channel.slot, await self._engine.close(channel)
        self._frames.send(("closed", slot, is_clean, self._engine.memory_used_bytes), slot)

    def _lose(self) -> None:
        if not self._lost.done():
            self._lost.set_result(None)
        self._settings.cancel()


class _ForwardingHandler(logging.Handler):
    """Sends each log record to the worker, whose log has one format and one level."""

    def __init__(self, loop: asyncio.AbstractEventLoop, send: Callable[[object], None]) -> None:
        super().__init__()
        self._loop = loop
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        sent = copy.copy(record)
        sent.msg, sent.args = record.getMessage(), None
        if record.exc_info:
            sent.exc_text = logging.Formatter().formatException(record.exc_info)
            sent.exc_info = None
        self._loop.call_soon_threadsafe(self._send, ("log", sent))


def main() -> None:
    """Run the engine process. Its argument is the number of its end of the socketpair."""
    end_with_parent()
    forbid_inspection()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)

    async def serve() -> None:
        await _Child().serve(connection)

    uvloop.run(serve())


if __name__ == "__main__":
    main()
