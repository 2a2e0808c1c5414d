"""One WebSocket of the edge as a session's client: messages, events, pings and backpressure."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from typing import Any

from aiohttp import WebSocketError, WSCloseCode, WSMsgType, web

from duplane.edge.close import NOT_READ, Close, CloseReason
from duplane.edge.settings import Limits
from duplane.edge.transport.client import Receiver
from duplane.edge.transport.client_protocol import ClientProtocol
from duplane.edge.transport.closing import ClosingResponse, linger
from duplane.edge.transport.outbox import Outbox


class WebSocket:
    """The server's side of one WebSocket.

    Compression is declined: deflating an answer would cost more CPU time than the rest of the edge.
    aiohttp reads the frames and answers the handshakes; `send` writes text frames by itself, so
    that an event reaches the connection without a task of its own.
    """

    def __init__(self, request: web.Request, limits: Limits, max_message_bytes: int) -> None:
        protocol = request.protocol
        assert isinstance(protocol, ClientProtocol)
        self._protocol = protocol
        self._request = request
        self._limits = limits
        self._outbox = Outbox(limits.outbox_bytes)  # filled only while the connection takes nothing
        self._is_sent = asyncio.Event()  # nothing waits in the outbox
        self._is_sent.set()
        self._reading: asyncio.Task[None] | None = None
        self._quota = protocol.become_websocket(max_message_bytes, self._on_writable)
        self._response = ClosingResponse(
            timeout=limits.close_s,
            autoclose=False,  # `serve` echoes the client's close code
            autoping=False,  # `serve` answers pings, within the client's CPU quota
            compress=False,
            max_msg_size=max_message_bytes,
            writer_limit=0,  # a pong waits whenever the transport's buffer is full
            decode_text=False,
        )

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncGenerator[web.WebSocketResponse]:
        """Do the opening handshake and keep the connection alive for the body of the `with`.

        Raises HTTPException for a bad handshake.
        """
        await self._response.prepare(self._request)
        pinging = asyncio.create_task(self._keep_alive())
        try:
            yield self._response
        finally:
            pinging.cancel()
            await asyncio.wait({pinging})

    async def serve(self, receiver: Receiver) -> None:
        """Read messages until the connection is closed.

        Waits for nothing but the client. So pings are answered and a lost client is noticed at
        once, also in the queue and while a unit runs.
        """
        self._reading = asyncio.current_task()
        loop, last_data_s = asyncio.get_running_loop(), 0.0
        while True:
            message = await self._response.receive()
            began_s = time.thread_time()
            if message.type is WSMsgType.TEXT:
                self._protocol.unread_bytes = 0
                await receiver.receive(message.data)
            elif not await self._take_control(message.type, message.data, receiver):
                return
            wait_s = self._quota.spend(loop.time(), time.thread_time() - began_s)
            if wait_s:
                await self._protocol.wait_lost(wait_s)
            elif last_data_s == self._protocol.last_data_s:
                await asyncio.sleep(0)  # messages were waiting: let other connections run
            last_data_s = self._protocol.last_data_s

    async def _take_control(self, kind: WSMsgType, content: Any, receiver: Receiver) -> bool:
        """Take a message other than text; return whether the connection goes on."""
        match kind:
            case WSMsgType.PING:
                try:
                    await self._response.pong(content)
                except ConnectionError:
                    receiver.end(self._lost())
                    return False
            case WSMsgType.PONG:
                pass
            case WSMsgType.BINARY:
                receiver.end(Close(CloseReason.UNREADABLE, "binary frames are not used"))
            case WSMsgType.CLOSE:
                await self._response.finish(content or WSCloseCode.OK, "")
                receiver.end(self._lost())
                return False
            case _:
                receiver.end(self._lost(content))
                return False
        return True

    def send(self, events: list[bytes]) -> None:
        """Write text messages; they wait while the connection takes none. Raises OutboxFullError.

        A lost connection takes everything: `serve` notices the loss.
        """
        if self._protocol.writing_paused:
            self._outbox.put(events)
            self._is_sent.clear()
            return
        socket = self._protocol.socket
        if socket.is_closing() or self._response.has_sent_close:
            return
        for event in events:
            # An unmasked text frame in one piece (RFC 6455, 5.2).
            length = len(event)
            if length < 126:
                header = bytes((0x81, length))
            elif length < 65_536:
                header = b"\x81\x7e" + length.to_bytes(2, "big")
            else:
                header = b"\x81\x7f" + length.to_bytes(8, "big")
            socket.writelines((header, event))

    async def close(self, close: Close, code: int) -> None:
        """Send what waits, linger if the client may be sending, and do the closing handshake.

        The handshake ends at most `close_s` after the client reads. What the client still sends
        is discarded until it closes, so that it can read everything it was sent. Raises nothing.
        """
        if close.reason not in NOT_READ:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._limits.send_s):
                    await self._is_sent.wait()
        self._outbox.clear()
        if self._reading:
            await linger(self._reading, close, self._limits.linger_s)
        if not self._response.has_sent_close:
            with contextlib.suppress(ConnectionError):
                await self._response.finish(code, close.text)
        await self._protocol.wait_lost(self._limits.close_s)
        self._protocol.abort()

    def _on_writable(self) -> None:
        """Write events that wait, as far as the connection takes them; it has room or is lost."""
        if self._protocol.socket.is_closing():
            self._outbox.clear()
        while self._outbox and not self._protocol.writing_paused:
            self.send([self._outbox.pop()])
        if not self._outbox:
            self._is_sent.set()

    async def _keep_alive(self) -> None:
        """Ping a client that is silent for `ping_s`; close if it stays silent as long again.

        Any data counts as an answer: in the middle of a long frame a client cannot send a pong.
        """
        loop, ping_s = asyncio.get_running_loop(), self._limits.ping_s
        while True:
            last_data_s = self._protocol.last_data_s
            await asyncio.sleep(last_data_s + ping_s - loop.time())
            if self._protocol.last_data_s != last_data_s:
                continue
            with contextlib.suppress(ConnectionError):
                await self._response.ping()
            await asyncio.sleep(ping_s)
            if self._protocol.last_data_s == last_data_s:
                await self._response.finish(WSCloseCode.INTERNAL_ERROR, "keepalive ping timeout")
                return

    def _lost(self, error: object = None) -> Close:
        """Return why the connection is lost; `error` is that of the frame that broke it, if any."""
        is_refused = isinstance(error, WebSocketError) and error.code == WSCloseCode.MESSAGE_TOO_BIG
        if self._protocol.write_timeout.is_expired:
            return Close(CloseReason.TOO_SLOW, "events are not read")
        is_too_big = is_refused or self._protocol.is_too_big
        return Close(CloseReason.TOO_BIG if is_too_big else CloseReason.GONE)
