"""The client of a session for one HTTP request whose answer may be a stream of events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from aiohttp import web

from duplane.edge.close import GONE, NOT_READ, TOO_SLOW, Close, CloseReason
from duplane.edge.dialects.o import DialectO
from duplane.edge.http.messages import closing
from duplane.edge.settings import Limits
from duplane.edge.transport.client import Receiver
from duplane.edge.transport.client_protocol import ClientProtocol
from duplane.edge.transport.outbox import Outbox

_LAST = b"[DONE]"
_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "X-Accel-Buffering": "no",  # proxies must not hold events back
}


class CompletionClient:
    """Sends one message, and gets an answer or a stream of events (`text/event-stream`).

    The handler of the request sends `answer`. If the answer is a stream, `serve` writes `stream`
    instead: it begins with the first event, and events wait in an outbox while the connection has
    no room. A client that does not read is cut. For one that reads more slowly than the model
    speaks, the outbox may hold as much as an answer that is not streamed.
    """

    def __init__(
        self, request: web.Request, body: bytes, dialect: DialectO, limits: Limits
    ) -> None:
        self.answer: bytes | None = None
        self.stream: web.StreamResponse | None = None
        self._request = request
        self._protocol = cast("ClientProtocol", request.protocol)  # the server makes no other
        self._body = body
        self._dialect = dialect
        self._send_s = limits.send_s
        self._outbox = Outbox(limits.answer_bytes)
        self._news = asyncio.Event()  # events wait in the outbox
        self._is_sent = asyncio.Event()  # set while no event waits
        self._is_sent.set()
        self._receiver: Receiver | None = None
        self._is_lost = False

    def leave(self) -> None:
        """Note that the connection is lost."""
        self._is_lost = True
        self._outbox.clear()
        self._is_sent.set()
        if self._receiver:
            self._receiver.end(self._lost())

    async def serve(self, receiver: Receiver) -> None:
        """Pass the body to the session, then write events until cancelled."""
        self._receiver = receiver
        if self._is_lost:
            receiver.end(self._lost())
        body, self._body = self._body, b""  # large, and of no use while the answer is made
        await receiver.receive(body)
        del body
        try:
            while not self._is_lost:
                await self._news.wait()
                self._news.clear()
                await self._write_events()
        except ConnectionError:
            self.leave()

    def send(self, events: list[bytes], on_written: Callable[[], None] | None = None) -> None:
        """Store the answer, or queue events of a stream. Raises OutboxFullError."""
        if not self._dialect.is_streaming:
            self.answer = events[-1]
            if on_written:
                on_written()
        elif not self._is_lost:
            self._outbox.put(events, on_written)
            self._is_sent.clear()
            self._news.set()

    async def close(self, close: Close, code: int) -> None:
        """End the stream after its last event; cut the connection if the client does not read.

        The rest of a whole answer has no time limit while the client reads it: `WriteTimeout` cuts
        the connection of one that reads almost nothing.
        """
        del code
        if close.reason in NOT_READ:
            self._cut()
            return
        is_answered = close.reason is CloseReason.ANSWERED
        try:
            async with asyncio.timeout(None if is_answered else self._send_s):
                await self._is_sent.wait()
                if self.stream and not self._is_lost:
                    if is_answered:
                        await self._write(_LAST)
                    await self.stream.write_eof()
        except (TimeoutError, ConnectionError):
            self._cut()

    def _cut(self) -> None:
        """Close the connection of a stream, so that the client does not take it for complete."""
        if self.stream:
            self._protocol.abort()

    async def _write_events(self) -> None:
        while self._outbox:
            event, on_written = self._outbox.pop()
            await self._write(event)
            if on_written:
                on_written()
        self._is_sent.set()

    async def _write(self, event: bytes) -> None:
        if self.stream is None:
            self._protocol.become_stream()
            self.stream = closing(web.StreamResponse(headers=_HEADERS))
            await self.stream.prepare(self._request)
        await self.stream.write(b"data: %b\n\n" % event)

    def _lost(self) -> Close:
        if self._protocol.write_timeout.is_expired:
            return TOO_SLOW
        return GONE
