"""One WebSocket connection: carries frames, fabric messages and the time to and from a session.

What they mean is decided in `session.py`; here is only who waits for what.
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import Literal, Protocol

from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode

from duplane.edge.clock import Alarm, Clock
from duplane.edge.dialects.fields import Fields
from duplane.edge.dialects.unwrap import is_worth_unwrapping, unwrap
from duplane.edge.ends import End, Ending
from duplane.edge.entry import close_reason
from duplane.edge.outbox import Outbox, OutboxFullError
from duplane.edge.pace import Pace
from duplane.edge.recording.recorder import Recording
from duplane.edge.session import Session
from duplane.edge.settings import Limits
from duplane.edge.spans import SessionSpans
from duplane.fabric.client import ConverseStream, FabricClient
from duplane.fabric.errors import FabricError
from duplane.fabric.v1 import lease_pb2

_UNTOLD = (End.GONE, End.TOO_BIG, End.TOO_SLOW)  # nobody reads the farewell
_UNREAD = Ending(End.TOO_SLOW, "events are not read")
# It comes in the middle of a client's sending. Who sends to a closed socket has failed, so a
# client is left the time to read that it is over, and to close by itself.
_IN_MID_STREAM = (End.TIMEOUT, End.CONTEXT_FULL)


class Socket(Protocol):
    """What carries the frames of one session. `ConnectionClosed` says that the client is gone."""

    @property
    def has_binary(self) -> bool:
        """Whether a binary frame has come."""
        ...

    async def recv(self, decode: Literal[False]) -> bytes:
        """Wait for a frame. Raises ConnectionClosed."""
        ...

    async def send(self, message: bytes, *, text: bool) -> None:
        """Send a frame. Raises ConnectionClosed."""
        ...

    @property
    def is_stalled(self) -> bool:
        """Whether it was cut because the client did not read."""
        ...

    async def rest(self, work_s: float) -> None:
        """Let the others have their turn after work for this client."""
        ...

    async def close(self, code: int, reason: str) -> None:
        """Say farewell."""
        ...


class Connection:
    """Runs one session on one socket."""

    def __init__(
        self,
        socket: Socket,
        session: Session,
        limits: Limits,
        fabric: FabricClient,
        spans: SessionSpans,
        clock: Clock,
    ) -> None:
        self.session = session
        self.recording: Recording | None = None
        self._socket = socket
        self._limits = limits
        self._fabric = fabric
        self._spans = spans
        self._clock = clock
        self._outbox = Outbox(limits.outbox_bytes)
        self._pace = Pace(limits.units_per_s)
        self._over = asyncio.Event()
        self._wake = asyncio.Event()  # there may be something for the worker
        self._has_stream = False
        self._alarm: Alarm | None = None
        self._alarm_at = math.inf

    async def run(self, wish: lease_pb2.AcquireLeaseRequest) -> None:
        """Wait for the slot that `wish` asks for, converse, and leave nothing behind."""
        try:
            async with asyncio.TaskGroup() as tasks:
                reading = tasks.create_task(self._read())
                writing = tasks.create_task(self._write())
                conversing = tasks.create_task(self._converse(wish))
                self._apply([])
                await self._over.wait()
                tasks.create_task(self._let_go(conversing))
                await self._say_farewell(reading, writing)
                reading.cancel()
        finally:
            if self._alarm:
                self._alarm.cancel()

    def end(self, ending: Ending) -> None:
        """End the session from outside."""
        self._apply(self.session.end(ending, self._clock.now()))

    def drain(self) -> None:
        """Tell the session that the edge shuts down."""
        self._apply(self.session.drain(self._clock.now()))

    # --- the client ---

    async def _read(self) -> None:
        """Read without ever waiting for anything but the client: pings are answered, and a leave
        is seen at once, also in the queue and while a unit runs. Only a long WAV file is decoded
        first, where no other session feels it."""
        try:
            while True:
                message = await self._socket.recv(decode=False)
                if self._socket.has_binary:
                    self.end(Ending(End.UNREADABLE, "binary frames are not used"))
                    continue
                began_s = time.thread_time()
                if is_worth_unwrapping(message):
                    self._take(message, await asyncio.to_thread(unwrap, message, self._limits))
                else:
                    self._take(message, message)
                await self._socket.rest(time.thread_time() - began_s)
        except ConnectionClosed as closed:
            self.end(self._lost(closed))

    def _take(self, message: bytes, event: bytes | Fields) -> None:
        """Let the session take an event, and the recording what the session made of it."""
        now, is_over = self._clock.now(), self.session.farewell is not None
        told = self.session.receive(event, now)
        if self.recording and not is_over:
            self.recording.up(message, self.session.take_heard(), now)
        self._apply(told)

    def _lost(self, closed: ConnectionClosed) -> Ending:
        if self._socket.is_stalled:
            return _UNREAD
        is_too_big = closed.sent is not None and closed.sent.code == CloseCode.MESSAGE_TOO_BIG
        return Ending(End.TOO_BIG if is_too_big else End.GONE)

    async def _write(self) -> None:
        try:
            async for event in self._outbox.events():
                await self._socket.send(event, text=True)  # the socket's patience has an end
        except ConnectionClosed:
            return  # the reader knows

    async def _say_farewell(self, reading: asyncio.Task[None], writing: asyncio.Task[None]) -> None:
        farewell = self.session.farewell
        assert farewell
        if farewell.end not in _UNTOLD:
            self._outbox.finish()
            await asyncio.wait({writing}, timeout=self._limits.send_s)
        writing.cancel()
        await asyncio.wait({writing})
        if farewell.end in _IN_MID_STREAM:
            await asyncio.wait({reading}, timeout=self._limits.linger_s)
        await self._socket.close(farewell.code, close_reason(farewell.reason))

    # --- the fabric ---

    async def _converse(self, wish: lease_pb2.AcquireLeaseRequest) -> None:
        try:
            async with self._fabric.session(wish, self._on_queued, self._spans.context) as stream:
                self._has_stream = True
                self._spans.granted(stream.granted.lease_id)
                if self.recording:
                    self.recording.worker = stream.granted.worker_address
                open_s = stream.claimed.open_timeout.ToTimedelta().total_seconds()
                self._apply(self.session.granted(open_s, self._clock.now()))
                async with asyncio.TaskGroup() as tasks:
                    sending = tasks.create_task(self._send_requests(stream))
                    await self._receive_responses(stream)
                    sending.cancel()
        except FabricError as error:
            self._apply(self.session.lost(error, self._clock.now()))

    async def _on_queued(self, queued: lease_pb2.Queued) -> None:
        self._apply(self.session.queued(queued, self._clock.now()))

    async def _send_requests(self, stream: ConverseStream) -> None:
        try:
            while self.session.farewell is None:
                now_s = self._clock.now().monotonic_s
                if self._pace.due_s > now_s:
                    await self._woken(self._pace.due_s)
                    continue
                request = self.session.next_request()
                if request is None:
                    await self._woken()
                    continue
                if request.WhichOneof("message") == "unit":
                    self._pace.spend(now_s)
                    self._spans.sent(request.unit)
                await stream.write(request)
            await stream.end_input()
        except FabricError:
            return  # the receiving side says why

    async def _woken(self, due_s: float | None = None) -> None:
        """Wait until there may be something for the worker, or it is time."""
        self._wake.clear()
        alarm = None if due_s is None else self._clock.call_at(due_s, self._wake.set)
        try:
            await self._wake.wait()
        finally:
            if alarm:
                alarm.cancel()

    async def _receive_responses(self, stream: ConverseStream) -> None:
        try:
            async for response in stream.responses():
                self._apply(self.session.answered(response, self._clock.now()))
                self._spans.answered(response)
        except FabricError as error:
            self._apply(self.session.lost(error, self._clock.now()))

    async def _let_go(self, conversing: asyncio.Task[None]) -> None:
        """Leave the queue at once, or let the worker say its last word."""
        if self._has_stream:
            await asyncio.wait({conversing}, timeout=self._limits.end_s)
        conversing.cancel()

    # --- the session ---

    def _apply(self, events: list[bytes]) -> None:
        """Do what the session wants after anything has happened."""
        try:
            self._outbox.put(events)
        except OutboxFullError:
            self.session.end(_UNREAD, self._clock.now())
        else:
            if self.recording:
                self.recording.down(events, self._clock.now())
        if self.session.farewell:
            self._over.set()
        self._wake.set()
        self._set_alarm()

    def _set_alarm(self) -> None:
        """Wake up in time. A deadline that has moved away is noticed when the alarm rings."""
        deadline = self.session.deadline
        if deadline >= self._alarm_at:
            return
        if self._alarm:
            self._alarm.cancel()
        self._alarm_at = deadline
        self._alarm = self._clock.call_at(deadline, self._ring)

    def _ring(self) -> None:
        self._alarm_at = math.inf
        self._apply(self.session.expire(self._clock.now()))
