"""The base class of the gRPC calls that hold a slot: bounded reads and writes, and the end.

`DuplexCall` and `ChatCall` read and send the messages of Converse and Chat calls. A call uses only
its stream and its slot's channel to the device thread, not leases or other calls.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import logging
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar

import grpc.aio

from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.v1 import session_pb2
from duplane.worker.engine.device_thread import DeviceThread
from duplane.worker.engine.events import Event
from duplane.worker.engine.preparation import AbandonedError
from duplane.worker.settings import SessionLimits

_log = logging.getLogger(__name__)

Response = TypeVar("Response", session_pb2.ConverseResponse, session_pb2.ChatResponse)
Stream = grpc.aio.ServicerContext[Any, Any]
CallEnd = session_pb2.Closed | FabricError

MODEL_FAILED = "the model failed; its log says why"


class Call(abc.ABC, Generic[Response]):
    """The call that holds a claimed slot, from the claim to the end.

    Up to `outbox_capacity` responses wait for a client that reads slowly. One more response ends
    the call with SLOW_CLIENT.
    """

    def __init__(
        self,
        stream: Stream,
        slot: int,
        engine: DeviceThread,
        limits: SessionLimits,
        outbox_capacity: int,
    ) -> None:
        self._stream = stream
        self._engine = engine
        self._limits = limits
        self._end: asyncio.Future[CallEnd] = asyncio.get_running_loop().create_future()
        self._outbox_capacity = outbox_capacity
        # An entry is a response and a function to call when the response is written. The entry
        # None ends the writer. The two places beyond the capacity are for the last response and
        # for None.
        self._outbox = asyncio.Queue[tuple[Response, Callable[[], None] | None] | None](
            outbox_capacity + 2
        )
        self.channel = engine.attach(slot, self._on_event)

    @abc.abstractmethod
    def close(self, reason: session_pb2.CloseReason) -> None:
        """End the call for `reason`."""

    @abc.abstractmethod
    async def _receive(self) -> None:
        """Process the client's requests until the call ends. Overrides use `_ending_on_errors`."""

    @abc.abstractmethod
    def _on_event(self, event: Event) -> None:
        """Handle an event of the device thread. Events after the end are ignored."""

    @abc.abstractmethod
    def _last_response(self, end: CallEnd) -> Response | None:
        """Return the last response of a stream that ends with `end`, or None if there is none."""

    def end(self, end: CallEnd) -> None:
        """End the call. Only the first call of this method has an effect."""
        if not self._end.done():
            self._end.set_result(end)

    async def run(self, on_end: Callable[[CallEnd], None]) -> None:
        """Serve the call to its end. Raises FabricError if it ends with a failure.

        `on_end` is called once, as soon as the end is known. This is before the client has read the
        last responses, so that the slot can be cleaned meanwhile.
        """
        async with asyncio.TaskGroup() as tasks:
            reader = tasks.create_task(self._receive())
            writer = tasks.create_task(self._write())
            end = await self._end
            self._engine.mute(self.channel)
            on_end(end)
            reader.cancel()
            if last := self._last_response(end):
                self._outbox.put_nowait((last, None))
            self._outbox.put_nowait(None)
            await asyncio.wait({writer}, timeout=self._limits.flush_timeout_s)
            writer.cancel()
        if isinstance(end, FabricError):
            raise end

    @contextlib.contextmanager
    def _ending_on_errors(self) -> Generator[None]:
        """End the call if the body of the `with` raises a FabricError or the client is gone."""
        try:
            yield
        except FabricError as error:
            self.end(error)
        except grpc.aio.BaseError as error:
            _log.debug("the client is gone: %s", error)
            self.end(session_pb2.Closed(reason=session_pb2.CLOSE_REASON_CLIENT))
        except AbandonedError:
            pass  # the call has ended already

    def _send(self, response: Response, on_written: Callable[[], None] | None = None) -> None:
        """Queue a response for the client."""
        if self._outbox.qsize() < self._outbox_capacity:
            self._outbox.put_nowait((response, on_written))
        else:
            self._on_slow_client()

    async def _write(self) -> None:
        """Write responses until the last one is written or the client is gone."""
        with self._ending_on_errors():
            while queued := await self._outbox.get():
                response, on_written = queued
                try:
                    async with asyncio.timeout(self._limits.stall_timeout_s):
                        await self._stream.write(response)
                except TimeoutError:
                    self._on_slow_client()
                    return
                if on_written is not None:
                    on_written()

    def _on_slow_client(self) -> None:
        self.end(FabricError(Reason.SLOW_CLIENT, "the client does not read the responses"))
