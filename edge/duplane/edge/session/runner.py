"""Base class of the runners: connects a session with its client, the fabric and the clock.

The session makes all decisions. The runner waits for messages, responses and timers, passes them to
the session, and sends the result. `DuplexRunner` and `ChatRunner` add the calls to the fabric.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from duplane.edge.clock import Clock, Moment, Timer
from duplane.edge.close import TOO_SLOW, Close, CloseReason
from duplane.edge.metrics import EdgeMetrics
from duplane.edge.recording.recorder import Recording
from duplane.edge.session.effects import Effect
from duplane.edge.session.receipt import Receipt
from duplane.edge.session.session import Session
from duplane.edge.settings import Limits
from duplane.edge.spans import SessionSpans
from duplane.edge.transport.client import Client
from duplane.edge.transport.outbox import OutboxFullError
from duplane.fabric.client import FabricClient, worker_name
from duplane.fabric.errors import FabricError
from duplane.fabric.monitoring.spans import EDGE_CLOSE, EDGE_QUEUE
from duplane.fabric.v1 import lease_pb2

_log = logging.getLogger(__name__)

# A message longer than this is decoded in a thread, since decoding it would delay other sessions.
_LONG_MESSAGE_BYTES = 256 * 1024

S = TypeVar("S", bound=Session[Any])


class ReplacedError(Exception):
    """Another session continues for the client, so this runner reads no further message."""


class SessionRunner(ABC, Generic[S]):
    """Runs one session for one client."""

    def __init__(
        self,
        session: S,
        client: Client,
        limits: Limits,
        fabric: FabricClient,
        spans: SessionSpans,
        clock: Clock,
        metrics: EdgeMetrics,
    ) -> None:
        self.session: S = session
        self.recording: Recording | None = None
        self.worker = ""  # name of the worker of the last grant
        self.generation = 0  # rises with each socket of the session
        self._client = client
        self._limits = limits
        self._fabric = fabric
        self._spans = spans
        self._clock = clock
        self._metrics = metrics
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._wake = asyncio.Event()  # wakes the task that sends to the worker
        self._timer: Timer | None = None
        self._timer_s = math.inf

    async def run(self, request: lease_pb2.AcquireLeaseRequest) -> None:
        """Acquire the slots that `request` describes, run the session, and release everything.

        If another session replaces this one, the client stays connected: a runner of the other
        session must serve it. A session that ends while it is replaced closes the connection.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                serving = tasks.create_task(self._serve())
                exchanging = tasks.create_task(self._exchange(request))
                now = self._clock.now()
                self._apply(self._connected(now), now)  # also sets the timer
                await self._over
                stopping = tasks.create_task(self._stop_exchange(exchanging))
                if self._leaves_client:
                    await asyncio.wait({serving, exchanging, stopping})
                elif self.session.closed:
                    self._spans.begin(EDGE_CLOSE)
                    await self._close(self.session.closed)
                    serving.cancel()
        finally:
            if self._timer:
                self._timer.cancel()
            if not (self.session.closed or self.session.successor):  # after an unexpected error
                self.session.end(Close(CloseReason.FAILED, "internal error"), self._clock.now())
                self._execute_effects()

    @property
    def _leaves_client(self) -> bool:
        """Whether the client stays connected when the session is over."""
        return self.session.closed is None

    def _connected(self, now: Moment) -> list[bytes]:
        """Return the first events for the client."""
        return self.session.connected(now)

    async def _serve(self) -> None:
        """Pass the client's messages to the session until it is over."""
        with contextlib.suppress(ReplacedError):
            await self._client.serve(self)

    async def _close(self, close: Close) -> None:
        """Close the client's connection."""
        await self._client.close(close, self.session.close_code)

    async def receive(self, message: bytes, waited_s: float = 0.0) -> None:
        """Handle one message of the client. A long message is decoded in a thread."""
        if self.session.closed:
            return
        read = now = self._clock.now()
        if is_long := len(message) >= _LONG_MESSAGE_BYTES:
            generation = self.generation
            decoded = await asyncio.to_thread(self.session.decode, message)
            if generation != self.generation:
                return  # meanwhile the session has another socket, whose client sends this again
        else:
            decoded = self.session.decode(message)
        if is_long or self._spans.are_exported:
            now = self._clock.now()
        is_recorded = self.recording and not self.session.closed
        received_ns, received_s = read.wall_ns - int(waited_s * 1e9), read.monotonic_s - waited_s
        receipt = Receipt(received_ns, read.wall_ns, now.wall_ns, received_s)
        events = self.session.receive(decoded, now, receipt)
        if self.recording and is_recorded and not (self.session.closed and self._leaves_client):
            sound = self.session.dialect.input_sound
            self.recording.up(message, self.session.take_recorded_audio(), now, sound)
        self._apply(events, now)
        self._wake.set()
        if self.session.successor or (self.session.closed and self._leaves_client):
            raise ReplacedError

    def end(self, close: Close) -> None:
        """End the session for a reason that the session itself does not know."""
        now = self._clock.now()
        self._apply(self.session.end(close, now), now)

    def drain(self) -> None:
        """Tell the session that the edge shuts down."""
        now = self._clock.now()
        self._apply(self.session.drain(now), now)

    @abstractmethod
    async def _exchange(self, request: lease_pb2.AcquireLeaseRequest) -> None:
        """Acquire slots and exchange messages with workers until the session ends."""

    @abstractmethod
    async def _stop_exchange(self, exchanging: asyncio.Task[None]) -> None:
        """End `exchanging`, the task of `_exchange`, in bounded time.

        Called after the session has ended.
        """

    async def _on_queued(self, queued: lease_pb2.Queued) -> None:
        self._spans.begin(EDGE_QUEUE)
        _log.debug("waits at position %d of %d", queued.position, queued.queue_length)
        now = self._clock.now()
        self._apply(self.session.queued(queued, now), now)

    def _failed(self, error: FabricError) -> None:
        """Tell the session that a call to the fabric has failed."""
        self._metrics.stream_failed(error.reason)
        _log.debug("a call failed: %s", error.reason)
        now = self._clock.now()
        self._apply(self.session.failed(error, now), now)

    def _on_granted(self, granted: lease_pb2.Granted) -> None:
        self._spans.granted(granted.lease_id)

    def _note_claim(self, granted: lease_pb2.Granted) -> None:
        """Record that the granted slot is claimed."""
        self._spans.end_step()
        self.worker = worker_name(granted)
        release = granted.release or "an older release"
        _log.debug("lease %s on worker %s (%s)", granted.lease_id, self.worker, release)
        if self.recording:
            self.recording.worker = self.worker

    def _apply(
        self, events: list[bytes], now: Moment, on_written: Callable[[], None] | None = None
    ) -> None:
        """Send `events` to the client.

        Then end the session if it is closed, or else update the timer. Then execute the effects of
        the session.

        `on_written` is called when the client's connection has taken the events.
        """
        if on_written and not events:
            on_written()
        if events:
            try:
                self._client.send(events, on_written)
            except OutboxFullError:
                self._too_slow(now)
            else:
                if self.recording:
                    self.recording.down(events, now, self.session.dialect.output_sound)
        if self.session.closed or self.session.successor:
            if not self._over.done():
                self._over.set_result(None)
            self._wake.set()
        elif (deadline := self.session.time_limits.next_deadline) < self._timer_s:
            self._set_timer(deadline)
        self._execute_effects()

    def _too_slow(self, now: Moment) -> None:
        """End the session of a client that does not read its events."""
        self.session.end(TOO_SLOW, now)

    def _execute_effects(self) -> None:
        while self.session.effects:
            self._execute(self.session.effects.popleft())

    def _execute(self, effect: Effect) -> None:
        """Execute an effect of the session."""
        raise AssertionError(f"the session has no effect {type(effect).__name__}")

    def _set_timer(self, deadline: float) -> None:
        """Set the timer to a deadline that is earlier than the present one.

        After the timer has fired, it is set to the session's next deadline.
        """
        if self._timer:
            self._timer.cancel()
        self._timer_s = deadline
        self._timer = self._clock.call_at(deadline, self._on_timer)

    def _on_timer(self) -> None:
        self._timer_s = math.inf
        now = self._clock.now()
        self._apply(self.session.expire(now), now)
        self._wake.set()
