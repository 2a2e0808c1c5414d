"""One WebSocket as the edge reads and writes it: neither faster than it may, nor for ever.

What the library leaves open is bounded here: control frames that nobody reads the answers to, work
without end in one go, writing that stands still, a closing handshake that nobody finishes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from enum import Enum, auto
from typing import Any

from websockets.asyncio.server import ServerConnection
from websockets.frames import Frame, Opcode
from websockets.http11 import Request, Response

from duplane.edge.pace import Share
from duplane.edge.patience import Patience
from duplane.edge.settings import Limits

# What is read at once, while it is as cheap as audio is; and of the smallest frames, that are not.
_SLICE_BYTES = 16 * 1024
_SMALL_SLICE_BYTES = 1024
_TURN_S = 0.002  # of work; then the others have their turn


class _Hold(Enum):
    """Why nothing is read from the network for a while."""

    QUEUE = auto()  # messages wait already
    WORK = auto()  # the client has made more work than is its share
    UNREAD = auto()  # it does not read the answers to its pings


class EdgeSocket(ServerConnection):
    """A connection that is fair to the others; and that knows if it was ever sent a binary frame.

    Frames are received undecoded, which looks the same for text and binary.
    """

    def __init__(
        self, *arguments: Any, limits: Limits, on_lost: Callable[[], None], **settings: Any
    ) -> None:
        super().__init__(*arguments, **settings)
        self.has_binary = False
        self._limits = limits
        self._on_lost = on_lost
        self._share = Share(limits.read_share)
        self._holds: set[_Hold] = set()
        self._unfed = memoryview(b"")  # received, and not given to the protocol yet
        self._slice_bytes = _SLICE_BYTES
        self._patience: Patience | None = None
        self._work_alarm: asyncio.TimerHandle | None = None
        self._close_alarm: asyncio.TimerHandle | None = None

    @property
    def is_stalled(self) -> bool:
        """Whether it was cut because the client did not read."""
        return self._patience is not None and self._patience.is_spent

    async def rest(self, work_s: float) -> None:
        """Let the others have their turn after work for this client, as long as is fair."""
        wait_s = self._share.spend(self.loop.time(), work_s)
        if wait_s:
            await asyncio.wait({self.connection_lost_waiter}, timeout=wait_s)
        else:
            await asyncio.sleep(0)

    # --- the transport ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._patience = Patience(self.transport, self._limits.send_s)
        self.recv_messages.pause = lambda: self._hold(_Hold.QUEUE)
        self.recv_messages.resume = lambda: self._let_go(_Hold.QUEUE)

    def connection_lost(self, exc: Exception | None) -> None:
        for alarm in (self._work_alarm, self._close_alarm):
            if alarm:
                alarm.cancel()
        if self._patience:
            self._patience.end()
        super().connection_lost(exc)
        self._on_lost()

    def pause_writing(self) -> None:
        super().pause_writing()
        assert self._patience
        self._patience.begin()

    def resume_writing(self) -> None:
        assert self._patience
        self._patience.end()
        super().resume_writing()
        self._let_go(_Hold.UNREAD)

    # --- reading ---

    def data_received(self, data: bytes) -> None:
        self._unfed = memoryview(b"".join((self._unfed, data)) if self._unfed else data)
        self._is_heard()
        self._feed()

    def process_event(self, event: Frame | Request | Response) -> None:
        if isinstance(event, Frame) and event.opcode is Opcode.BINARY:
            self.has_binary = True
        super().process_event(event)

    def _is_heard(self) -> None:
        """Whoever sends lives: in the middle of a long message nobody can answer a ping."""
        for pong_received, _ in self.pending_pings.values():
            if not pong_received.done():
                pong_received.set_result(0.0)
        self.pending_pings.clear()

    def _feed(self) -> None:
        """Give what was received to the protocol, piece by piece, until there is a hold."""
        turn_s = 0.0
        while self._unfed and not self._holds:
            piece = bytes(self._unfed[: self._slice_bytes])
            self._unfed = self._unfed[self._slice_bytes :]
            began_s = time.thread_time()
            super().data_received(piece)
            work_s = time.thread_time() - began_s
            turn_s += work_s
            is_costly = work_s * _SLICE_BYTES > _TURN_S * len(piece)
            self._slice_bytes = _SMALL_SLICE_BYTES if is_costly else _SLICE_BYTES
            self._limit_work(work_s, is_turn_over=turn_s > _TURN_S)
            if self.paused and self.transport.get_write_buffer_size() > self._limits.outbox_bytes:
                self._hold(_Hold.UNREAD)
        if self.close_deadline is not None and self._close_alarm is None:
            # The library waits for a client to finish a close only where somebody awaits it.
            self._close_alarm = self.loop.call_at(self.close_deadline, self.transport.abort)

    def _limit_work(self, work_s: float, *, is_turn_over: bool) -> None:
        wait_s = self._share.spend(self.loop.time(), work_s)
        if wait_s or is_turn_over:
            self._hold(_Hold.WORK)
            self._work_alarm = self.loop.call_later(wait_s, self._let_go, _Hold.WORK)

    def _hold(self, reason: _Hold) -> None:
        if not self._holds and not self.transport.is_closing():
            self.transport.pause_reading()
        self._holds.add(reason)

    def _let_go(self, reason: _Hold) -> None:
        if reason not in self._holds:
            return
        self._holds.discard(reason)
        self._feed()
        if not self._holds and not self.transport.is_closing():
            self.transport.resume_reading()
