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
from duplane.worker.engine.engine import AnyEngine
from duplane.worker.engine.events import Event
from duplane.worker.engine.preparation import AbandonedError
from duplane.worker.engine.slot_channel import Channel
from duplane.worker.settings import SessionLimits

_log = logging.getLogger(__name__)

Response = TypeVar("Response", session_pb2.ConverseResponse, session_pb2.ChatResponse)
Stream = grpc.aio.ServicerContext[Any, Any]
CallEnd = session_pb2.Closed | FabricError

MODEL_FAILED = "the model failed; its log says why"


class Connection(Generic[Response]):
    """The stream of a call, and the responses that wait until the client reads them.

    An entry of the outbox is a response and a function to call when the response is written. The
    entry None ends the writer. The three places beyond the capacity are for a response of
    `background`, the last response and None. `left` is done when the call no longer uses the
    stream, although it has not ended; its result is the error for the client, if any.
    """

    def __init__(self, stream: Stream, outbox_capacity: int) -> None:
        self.stream = stream
        self.capacity = outbox_capacity
        self.outbox = asyncio.Queue[tuple[Response, Callable[[], None] | None] | None](
            outbox_capacity + 3
        )
        self.background: Generator[Response] = _nothing()
        self.left: asyncio.Future[FabricError | None] = asyncio.get_running_loop().create_future()

    def put_background(self, on_written: Callable[[], None]) -> None:
        """Queue the next response of `background`, if there is one and the stream is in use.

        The next call comes from `on_written`, so at most one such response waits.
        """
        if not self.left.done() and (response := next(self.background, None)) is not None:
            self.outbox.put_nowait((response, on_written))

    def leave(self, error: FabricError | None) -> None:
        """Use the stream no longer. Only the first call of this method has an effect."""
        if not self.left.done():
            self.left.set_result(error)


class Call(abc.ABC, Generic[Response]):
    """The call that holds a claimed slot, from the claim to the end.

    Up to `outbox_capacity` responses wait for a client that reads slowly. One more response ends
    the call with SLOW_CLIENT.
    """

    def __init__(
        self,
        stream: Stream,
        slot: int,
        engine: AnyEngine,
        limits: SessionLimits,
        outbox_capacity: int,
    ) -> None:
        self._connection: Connection[Response] = Connection(stream, outbox_capacity)
        self._engine = engine
        self._limits = limits
        self._end: asyncio.Future[CallEnd] = asyncio.get_running_loop().create_future()
        self.channel: Channel = engine.attach(slot, self._on_event)

    @abc.abstractmethod
    def close(self, reason: session_pb2.CloseReason) -> None:
        """End the call for `reason`."""

    @abc.abstractmethod
    async def _receive(self, connection: Connection[Response]) -> None:
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

    async def run(
        self,
        on_end: Callable[[CallEnd], None],
        connection: Connection[Response] | None = None,
    ) -> None:
        """Serve the call to its end. Raises FabricError if it ends with a failure.

        `connection` is a later one of the call; the first one is used without it.

        `on_end` is called once, as soon as the end is known. This is before the client has read the
        last responses, so that the slot can be cleaned meanwhile.
        """
        connection = connection or self._connection
        async with asyncio.TaskGroup() as tasks:
            reader = tasks.create_task(self._receive(connection))
            writer = tasks.create_task(self._write(connection))
            await asyncio.wait({self._end, connection.left}, return_when=asyncio.FIRST_COMPLETED)
            reader.cancel()
            if not connection.left.done():
                self._finish(connection, on_end)
                await asyncio.wait({writer}, timeout=self._limits.flush_timeout_s)
            writer.cancel()
        error = connection.left.result() if connection.left.done() else self._end.result()
        if isinstance(error, FabricError):
            raise error

    def _finish(self, connection: Connection[Response], on_end: Callable[[CallEnd], None]) -> None:
        end = self._end.result()
        self._engine.mute(self.channel)
        on_end(end)
        if last := self._last_response(end):
            connection.outbox.put_nowait((last, None))
        connection.outbox.put_nowait(None)

    def abandon(self, stream: Stream) -> bool:
        """Note that a stream has ended. Return whether the call goes on without it."""
        del stream
        return False

    def _lose(self, connection: Connection[Response], error: FabricError | None) -> None:
        """End the call, because its stream is broken, or because of an error of the client."""
        del connection
        self.end(error or session_pb2.Closed(reason=session_pb2.CLOSE_REASON_CLIENT))

    @contextlib.contextmanager
    def _ending_on_errors(self, connection: Connection[Response]) -> Generator[None]:
        """End the call if the body of the `with` raises a FabricError or the client is gone."""
        try:
            yield
        except FabricError as error:
            self.end(error)
        except grpc.aio.BaseError as error:
            _log.debug("the client is gone: %s", error)
            self._lose(connection, None)
        except AbandonedError:
            pass  # the call has ended already

    def _send(self, response: Response, on_written: Callable[[], None] | None = None) -> None:
        """Queue a response for the client, if there is a stream to one."""
        connection = self._connection
        if connection.left.done():
            return
        if connection.outbox.qsize() < connection.capacity:
            connection.outbox.put_nowait((response, on_written))
        else:
            self._lose(connection, _slow_client())

    async def _write(self, connection: Connection[Response]) -> None:
        """Write responses until the last one is written or the client is gone."""
        with contextlib.closing(connection.background), self._ending_on_errors(connection):
            while queued := await connection.outbox.get():
                response, on_written = queued
                await self._write_one(connection, response)
                if on_written is not None:
                    on_written()

    async def _write_one(self, connection: Connection[Response], response: Response) -> None:
        """Write a response. If the client does not read it, the stream counts as broken."""
        try:
            async with asyncio.timeout(self._limits.stall_timeout_s):
                await connection.stream.write(response)
        except TimeoutError:
            self._lose(connection, _slow_client())
            raise AbandonedError from None


def _nothing() -> Generator[Any]:
    yield from ()


def _slow_client() -> FabricError:
    return FabricError(Reason.SLOW_CLIENT, "the client does not read the responses")
