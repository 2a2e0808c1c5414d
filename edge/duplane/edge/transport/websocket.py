"""A session's client over a WebSocket: messages, events, pings and backpressure."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from typing import Any, cast

from aiohttp import WebSocketError, WSCloseCode, WSMsgType, web

from duplane.edge.close import NOT_READ, TOO_SLOW, Close, CloseReason
from duplane.edge.settings import Limits
from duplane.edge.transport.client import Receiver
from duplane.edge.transport.client_protocol import ClientProtocol
from duplane.edge.transport.closing import ClosingResponse, echoed_code, linger
from duplane.edge.transport.outbox import Outbox

# The subprotocols that the edge selects if a client offers them: their names for the dialects A to
# D, and for OpenAI's protocols. A browser closes the connection if it offers subprotocols and none
# is selected. Clients also offer values that contain a key; none is ever selected.
SUBPROTOCOLS = ("map.realtime", "duplane.realtime")
OPENAI_SUBPROTOCOLS = ("realtime",)

_DECODED_BYTES = 64 * 1024  # of a text at a time

# aiohttp's only message of this logger quotes all values that a client offers, and so its keys.
logging.getLogger("aiohttp.websocket").disabled = True


class WebSocket:
    """The server's side of one WebSocket.

    Compression is refused, because it would cost more CPU time than all other work of the edge.
    aiohttp reads the frames and does the handshakes. `send` writes text frames itself, so that no
    task is needed for each event.
    """

    def __init__(
        self,
        request: web.Request,
        limits: Limits,
        max_message_bytes: int,
        subprotocols: Sequence[str] = SUBPROTOCOLS,
    ) -> None:
        protocol = cast("ClientProtocol", request.protocol)  # the server makes no other
        self._protocol = protocol
        self._request = request
        self._limits = limits
        self._outbox = Outbox(limits.outbox_bytes)  # used only while the connection is full
        self._is_sent = asyncio.Event()  # set while the outbox is empty
        self._is_sent.set()
        self._reading: asyncio.Task[None] | None = None
        self._quota = protocol.become_websocket(max_message_bytes, self._on_writable)
        self._response = ClosingResponse(
            timeout=limits.close_s,
            autoclose=False,  # `serve` echoes the client's close code
            autoping=False,  # `serve` answers pings, within the client's CPU quota
            protocols=subprotocols,
            compress=False,
            max_msg_size=max_message_bytes,
            writer_limit=0,  # so that a pong waits while the transport's buffer is full
            decode_text=False,
        )

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncGenerator[web.WebSocketResponse]:
        """Do the opening handshake; keep the connection alive during the body of the `with`.

        Raises HTTPException for a bad handshake.
        """
        try:
            await self._response.prepare(self._request)
        except UnicodeEncodeError:  # from the text of aiohttp's refusal, which quotes a header
            raise web.HTTPBadRequest(text="the request has a header that is not UTF-8") from None
        except ValueError:  # aiohttp refuses other keys that are no base64
            raise web.HTTPBadRequest(text="Sec-WebSocket-Key is not ASCII") from None
        pinging = asyncio.create_task(self._keep_alive())
        try:
            yield self._response
        finally:
            pinging.cancel()
            await asyncio.wait({pinging})

    async def serve(self, receiver: Receiver) -> None:
        """Read messages until the connection is closed.

        This method waits only for the client. So the edge immediately answers pings and detects a
        lost connection, even while the session waits in the queue or a unit runs.
        """
        self._reading = asyncio.current_task()
        loop = asyncio.get_running_loop()
        last_data_s = 0.0
        collections = self._protocol.collections
        while True:
            message = await self._response.receive()
            began_s = time.thread_time() - collections.total_s
            if message.type is WSMsgType.TEXT:
                if not is_utf8(message.data):
                    await self._response.close(code=WSCloseCode.INVALID_TEXT)
                    receiver.end(self._lost())
                    return
                self._protocol.unread_bytes = 0
                # If several messages wait, the time of the last data counts as the time of receipt
                # of all of them.
                waited_s = time.monotonic() - self._protocol.received_s
                await receiver.receive(message.data, waited_s)
            elif not await self._take_control(message.type, message.data, receiver):
                return
            used_s = time.thread_time() - collections.total_s - began_s
            wait_s = self._quota.spend(loop.time(), used_s)
            if wait_s:
                await self._protocol.wait_lost(wait_s)
            elif last_data_s == self._protocol.last_data_s:
                await asyncio.sleep(0)  # more messages wait, so let other connections run
            last_data_s = self._protocol.last_data_s

    async def _take_control(self, kind: WSMsgType, content: Any, receiver: Receiver) -> bool:
        """Handle a frame that is not text. Return False if the connection is over."""
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
                await self._response.finish(echoed_code(content), "")
                is_wanted = content == WSCloseCode.OK
                receiver.end(replace(self._lost(), is_wanted=is_wanted))
                return False
            case _:
                receiver.end(self._lost(content))
                return False
        return True

    def send(self, events: list[bytes], on_written: Callable[[], None] | None = None) -> None:
        """Write text messages, or queue them while the connection is full. Raises OutboxFullError.

        If the connection is lost, nothing is raised: `serve` detects the loss.
        """
        if self._protocol.writing_paused:
            self._outbox.put(events, on_written)
            self._is_sent.clear()
            return
        socket = self._protocol.socket
        if socket.is_closing() or self._response.has_sent_close:
            return
        for event in events:
            # The header of an unmasked, unfragmented text frame (RFC 6455, 5.2).
            length = len(event)
            if length < 126:
                header = bytes((0x81, length))
            elif length < 65_536:
                header = b"\x81\x7e" + length.to_bytes(2, "big")
            else:
                header = b"\x81\x7f" + length.to_bytes(8, "big")
            socket.writelines((header, event))
        if on_written:
            on_written()

    @property
    def is_open(self) -> bool:
        """Whether the connection is neither closed nor lost, as far as the edge knows."""
        return not (self._protocol.socket.is_closing() or self._response.has_sent_close)

    async def close(self, close: Close, code: int) -> None:
        """Send the queued events, linger if the client may be sending, do the closing handshake.

        To linger is to wait a while for the client to close. The handshake takes at most `close_s`.
        Meanwhile the client's messages are read and discarded: unread messages would make the
        kernel reset the connection, and the client could lose the last events. Raises nothing.
        """
        if close.reason not in NOT_READ:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._limits.send_s):
                    await self._is_sent.wait()
        self._outbox.clear()
        self._protocol.unread_bytes = 0  # the bound counts only what is discarded from now on
        if self._reading:
            await linger(self._reading, close, self._limits.linger_s)
        if not self._response.has_sent_close:
            with contextlib.suppress(ConnectionError):
                await self._response.finish(code, close.text)
        await self._protocol.wait_lost(self._limits.close_s)
        self._protocol.abort()

    def _on_writable(self) -> None:
        """Write queued events until the connection is full.

        Called when the connection has room, or when it is lost.
        """
        if self._protocol.socket.is_closing():
            self._outbox.clear()
        while self._outbox and not self._protocol.writing_paused:
            event, on_written = self._outbox.pop()
            self.send([event], on_written)
        if not self._outbox:
            self._is_sent.set()

    async def _keep_alive(self) -> None:
        """Ping a client that is silent for `ping_s`; close if it is silent for `ping_s` more.

        Any data counts as an answer, because a client cannot send a pong inside a long frame.
        """
        loop = asyncio.get_running_loop()
        ping_s = self._limits.ping_s
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
        """Return the close for a lost connection.

        `error` is the error of its last frame, if any.
        """
        is_refused = isinstance(error, WebSocketError) and error.code == WSCloseCode.MESSAGE_TOO_BIG
        if self._protocol.write_timeout.is_expired:
            return TOO_SLOW
        is_too_big = is_refused or self._protocol.is_too_big
        return Close(CloseReason.TOO_BIG if is_too_big else CloseReason.GONE)


def is_utf8(text: bytes) -> bool:
    """Return whether a text is UTF-8. This needs little memory, however long the text is."""
    if text.isascii():
        return True
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for start in range(0, len(text), _DECODED_BYTES):
            end = start + _DECODED_BYTES
            decoder.decode(text[start:end], final=end >= len(text))
    except UnicodeDecodeError:
        return False
    return True
