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

import uvloop

from duplane.worker.engine.device_thread import DeviceThread
from duplane.worker.engine.events import Event
from duplane.worker.engine.frames import Frames
from duplane.worker.engine.messages import (
    Alive,
    Attach,
    Call,
    Close,
    Closed,
    Ended,
    Loaded,
    Posted,
    Start,
)
from duplane.worker.engine.slot_channel import SlotChannel
from duplane.worker.models.families import open_device
from duplane.worker.models.interface import DeviceLostError, LoadError
from duplane.worker.sandbox import end_with_parent, forbid_inspection
from duplane.worker.settings import WorkerSettings

_log = logging.getLogger("duplane.worker.engine.engine_child")  # __name__ is __main__

# Interval at which Python switches threads. It is short, so that the event loop, which copies
# messages, does not delay the device thread.
_SWITCH_INTERVAL_S = 0.0005
_SIGNS_OF_LIFE = 8  # in the time after which a call counts as stuck or hung


class _Child:
    """Serves one worker, from its message Start to the end of the connection."""

    def __init__(self) -> None:
        self._frames = Frames(self._receive, self._lose)
        loop = asyncio.get_running_loop()
        self._settings: asyncio.Future[WorkerSettings] = loop.create_future()
        self._lost: asyncio.Future[None] = loop.create_future()
        self._engine: DeviceThread | None = None
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
            engine = self._engine = DeviceThread(open_device(settings), settings)
            await engine.start()
        except Exception as error:  # noqa: BLE001 - the root of the process; the worker raises it again
            ended = Ended(str(error), is_refused=isinstance(error, LoadError))
            if not ended.is_refused:
                _log.exception("the model cannot be loaded")
        else:
            engine.on_launches = self._frames.send
            gc.collect()
            gc.freeze()  # as `fabric.process.announce`
            loaded = Loaded(engine.constants, engine.description, engine.memory_used_bytes)
            self._frames.send(loaded)
            ended = await self._run(engine, min(settings.stuck_after_s, settings.hung_after_s))
        await asyncio.sleep(0)  # log records go first
        self._frames.send(ended)
        self._frames.close()
        await self._lost

    async def _run(self, engine: DeviceThread, limit_s: float) -> Ended:
        """Send signs of life until the connection is lost or the model has ended."""
        ends = {engine.ended, self._lost}
        while not any(end.done() for end in ends):
            self._frames.send(Alive(engine.busy_since_s))
            period_s = limit_s / _SIGNS_OF_LIFE
            await asyncio.wait(ends, timeout=period_s, return_when=asyncio.FIRST_COMPLETED)
        if self._lost.done():
            await engine.stop()
            return Ended("the worker has ended")
        error = engine.ended.exception()
        if not isinstance(error, DeviceLostError):
            _log.error("the device thread has failed", exc_info=error)
        return Ended(str(error))

    def _receive(self, message: object) -> None:
        match message:
            case Start(settings):
                self._settings.set_result(settings)
            case _ if self._engine is None:
                raise ValueError(f"{type(message).__name__} has come before the model is loaded")
            case Attach(slot):
                self._channels[slot] = self._engine.attach(slot, partial(self._post, slot))
            case Call(slot, method, arguments):
                getattr(self._engine, method)(self._channels[slot], **arguments)
            case Close(slot):
                task = asyncio.create_task(self._close(self._engine, self._channels.pop(slot)))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case _:
                raise ValueError(f"an unexpected {type(message).__name__}")

    async def _close(self, engine: DeviceThread, channel: SlotChannel) -> None:
        is_clean = await engine.close(channel)
        closed = Closed(channel.slot, is_clean, engine.memory_used_bytes)
        self._frames.send(closed, channel.slot)

    def _post(self, slot: int, event: Event) -> None:
        self._frames.send(Posted(slot, event), slot)

    def _lose(self) -> None:
        if not self._lost.done():
            self._lost.set_result(None)
        self._settings.cancel()


class _ForwardingHandler(logging.Handler):
    """Sends each log record to the worker, whose log has one format and one level."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, send: Callable[[logging.LogRecord], None]
    ) -> None:
        super().__init__()
        self._loop = loop
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        sent = copy.copy(record)
        sent.msg, sent.args = record.getMessage(), None
        if record.exc_info:
            sent.exc_text = logging.Formatter().formatException(record.exc_info)
            sent.exc_info = None
        self._loop.call_soon_threadsafe(self._send, sent)


def main() -> None:
    """Run the engine process. Its argument is the number of its end of the socketpair."""
    end_with_parent()
    forbid_inspection()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)

    async def serve() -> None:
        await _Child().serve(connection)

    uvloop.run(serve())


if __name__ == "__main__":
    main()
