"""One client connection, for plain HTTP and WebSocket, with limits from its first byte on.

aiohttp parses requests and frames. This protocol adds the limits that aiohttp leaves open: the
number of connections, the size of a request's head, the time to read an answer, and the CPU time
that the frames of one WebSocket may take.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any, cast

import orjson
from aiohttp import ClientConnectionResetError, web

from duplane.edge.settings import Limits
from duplane.edge.transport.client_address import ClientAddress, Network, is_proxy
from duplane.edge.transport.client_limits import ClientLimiter, LimitReached, Permit
from duplane.edge.transport.collection_time import CollectionTime
from duplane.edge.transport.rate_limit import RateLimit, cpu_quota
from duplane.edge.transport.write_timeout import WriteTimeout
from duplane.fabric.addresses import is_loopback

MAX_HEAD_BYTES = 32 * 1024  # of the first request; a longer head is refused

_QUEUE_BYTES = 256 * 1024  # larger than aiohttp's queue of complete messages
_UNSENT_BYTES = 128 * 1024  # of a stream, in the kernel
_HEAD_END = b"\r\n\r\n"
_HTTP_2_PREFACE = b"PRI "  # refused: aiohttp would wait for more bytes
_DETAILS = {HTTPStatus.INTERNAL_SERVER_ERROR: "internal error"}
_UNREADABLE = "the request cannot be read"


class ConnectionLimiter:
    """Limits the connections of one process, in total and per client address."""

    def __init__(self, limits: Limits, proxies: Sequence[Network]) -> None:
        self._limiter = ClientLimiter(limits.connection_count, limits.client_connection_count)
        self._proxies = proxies

    @property
    def counts(self) -> tuple[int, int]:
        """The number of open connections, and of connections cut because of a limit."""
        return self._limiter.count, self._limiter.refused_count

    def acquire(self, address: str) -> Permit | None:
        """Count a connection; return its permit, None if a limit is reached."""
        is_exempt = is_proxy(address, self._proxies) or is_loopback(address)
        client = None if is_exempt else ClientAddress(address, is_local=False).network
        permit = self._limiter.acquire(client)
        return None if isinstance(permit, LimitReached) else permit


def client_protocols(
    server: web.Server,
    limits: Limits,
    limiter: ConnectionLimiter,
    collections: CollectionTime,
    **settings: Any,
) -> Callable[[], asyncio.Protocol]:
    """Return a protocol factory for `loop.create_server`. `settings` go to RequestHandler."""
    return lambda: ClientProtocol(server, limits, limiter, collections, **settings)


class ClientProtocol(web.RequestHandler):
    """aiohttp's protocol of one connection, with the limits of the edge.

    A connection is cut if its client does not send a whole request head within `handshake_s`, or
    does not read its answer. For a WebSocket, `last_data_s` is the loop's time when the client last
    sent data, and `unread_bytes` counts the bytes received since the last message was read.
    """

    __slots__ = (
        *("_answer_timer", "_head", "_is_head_read", "_is_queue_full", "_limiter", "_limits"),
        *("_is_stream", "_lost", "_max_message_bytes", "_on_writable", "_quota"),
        *(
            "_permit",
            "_quota_timer",
            "_time",
            "collections",
            "is_too_big",
            "last_data_s",
            "received_s",
            "socket",
            "unread_bytes",
        ),
        "write_timeout",
    )

    def __init__(
        self,
        server: web.Server,
        limits: Limits,
        limiter: ConnectionLimiter,
        collections: CollectionTime,
        **settings: Any,
    ) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(
            server,
            loop=loop,
            keepalive_timeout=limits.handshake_s,  # also limits the wait for the first request
            lingering_time=limits.close_s,
            **settings,
        )
        self._time = loop.time
        self.collections = collections
        self.last_data_s = 0.0
        self.received_s = 0.0  # by `time.monotonic`, since the loop's time is rounded to ms
        self.unread_bytes = 0
        self.is_too_big = False  # cut because a message was too long
        self._max_message_bytes = 0
        self._limits = limits
        self._limiter = limiter
        self._lost = asyncio.Event()
        self._permit: Permit | None = None
        self._head = bytearray()
        self._is_head_read = False
        self._quota: RateLimit | None = None  # CPU time; only for a WebSocket
        self._on_writable: Callable[[], None] | None = None
        self._quota_timer: asyncio.TimerHandle | None = None
        self._is_queue_full = False  # aiohttp's queue of messages is full
        self._answer_timer: asyncio.TimerHandle | None = None
        self._is_stream = False  # the answer has no length, so no limit on its whole duration

    def become_stream(self) -> None:
        """Begin an answer that is written while it is made, and so has no time limit as a whole.

        A client that reads nothing, or almost nothing, is cut all the same. The kernel may hold
        only little that is not sent. If it held 4 MiB, it would say only after a third of them that
        it has room, and a client that plays speech while it reads would seem to read nothing.
        """
        self._is_stream = True
        connection: socket.socket = self.socket.get_extra_info("socket")
        with contextlib.suppress(OSError):  # the client may be gone
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)

    def become_websocket(
        self, max_message_bytes: int, on_writable: Callable[[], None]
    ) -> RateLimit:
        """Bound the size of the client's messages from now on, and the CPU time that they take.

        aiohttp bounds the payload of a message, but not the number of its fragments. `on_writable`
        is called when the connection accepts data again, and when the connection is lost.
        """
        self._on_writable = on_writable
        self._max_message_bytes = max_message_bytes
        self.last_data_s = self._time()
        self.received_s = time.monotonic()  # also for messages that came together with the request
        self._quota = cpu_quota(self._limits.read_share)
        return self._quota

    def exempt(self) -> None:
        """Count the connection no longer for its address: the client has sent a credential."""
        if self._permit:
            self._permit.exempt()

    async def wait_lost(self, timeout_s: float) -> None:
        """Wait until the connection is lost, at most `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._lost.wait()

    def abort(self) -> None:
        """Close the connection immediately. Data that is not sent yet is lost."""
        self.socket.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.socket = cast(asyncio.Transport, transport)  # uvloop's classes do not derive from it
        peer: Sequence[str] | None = transport.get_extra_info("peername")
        self._permit = self._limiter.acquire(peer[0] if peer else "")
        if self._permit is None:
            self.socket.abort()
            return
        self.write_timeout = WriteTimeout(self.socket, self._limits.send_s)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._lost.set()
        if self._permit is None:
            return
        self._permit.release()
        self.write_timeout.stop()
        for timer in (self._answer_timer, self._quota_timer):
            if timer:
                timer.cancel()
        super().connection_lost(exc)
        if self._on_writable:
            self._on_writable()

    # --- writing ---

    def pause_writing(self) -> None:
        super().pause_writing()
        self.write_timeout.start()
        has_limit = self._quota is None and not self._is_stream
        if has_limit and self._answer_timer is None:
            self._answer_timer = asyncio.get_running_loop().call_later(
                self._limits.http_s, self.socket.abort
            )

    def resume_writing(self) -> None:
        self.write_timeout.stop()
        super().resume_writing()
        if self._on_writable:
            self._on_writable()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = HTTPStatus.INTERNAL_SERVER_ERROR,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer in JSON if a request cannot be parsed, or if its handler failed."""
        if not isinstance(exc, ClientConnectionResetError):  # the client has gone: no fault
            super().handle_error(request, status, exc, message)  # only to write the log
        body = orjson.dumps({"detail": _DETAILS.get(HTTPStatus(status), _UNREADABLE)})
        answer = _AnonymousResponse(body=body, status=status, content_type="application/json")
        answer.force_close()
        return answer

    # --- reading ---

    def data_received(self, data: bytes) -> None:
        if self._quota is None:
            if self._is_head_read or self._check_head(data):
                super().data_received(data)
            return
        self.unread_bytes += len(data)
        if self.unread_bytes > 2 * self._max_message_bytes + _QUEUE_BYTES:
            self.is_too_big = True
            self.socket.abort()
            return
        self.last_data_s = self._time()
        self.received_s = time.monotonic()
        began_s = time.thread_time() - self.collections.total_s
        super().data_received(data)
        used_s = time.thread_time() - self.collections.total_s - began_s
        wait_s = self._quota.spend(self.last_data_s, used_s)
        # uvloop may read many times without running a task between the reads. After the bytes of
        # a message that is too long, the task that refuses it must run before the next read.
        if wait_s or self.unread_bytes > self._max_message_bytes:
            self._wait_for_quota(wait_s)

    def _check_head(self, data: bytes) -> bool:
        """Return whether the head of the first request is acceptable so far."""
        searched = max(0, len(self._head) - len(_HEAD_END) + 1)
        self._head += data if self._head else data.lstrip(b"\r\n")
        if self._head.startswith(_HTTP_2_PREFACE):
            self.socket.abort()
            return False
        if self._head.find(_HEAD_END, searched) >= 0:
            self._is_head_read = True
        elif len(self._head) > MAX_HEAD_BYTES:
            self._is_head_read = True
            self.socket.write(_HEAD_TOO_LONG)
            self.force_close()
            return False
        if self._is_head_read:
            self._head.clear()
        return True

    def _wait_for_quota(self, wait_s: float) -> None:
        """Read nothing for `wait_s`, and in any case not before the tasks that are ready."""
        if self._quota_timer:
            self._quota_timer.cancel()
        self._quota_timer = asyncio.get_running_loop().call_later(wait_s, self._on_quota)
        self.socket.pause_reading()

    def _on_quota(self) -> None:
        self._quota_timer = None
        if not self._is_queue_full and not self.socket.is_closing():
            self.socket.resume_reading()

    def pause_reading(self) -> None:
        """Stop reading until aiohttp's queue of messages has room; aiohttp calls this."""
        self._is_queue_full = True
        super().pause_reading()

    def resume_reading(self, resume_parser: bool = True) -> None:
        """Continue to read, unless the quota is used up; aiohttp calls this."""
        self._is_queue_full = False
        super().resume_reading(resume_parser)
        if self._quota_timer:
            self.socket.pause_reading()


class _AnonymousResponse(web.Response):
    """A response without the `Server` header.

    The signal `on_response_prepare` could not remove the header: aiohttp does not send this signal
    for answers to requests that it cannot parse. So this class overrides a private method.
    """

    async def _prepare_headers(self) -> None:
        await super()._prepare_headers()
        self.headers.popall("Server", None)


def _whole_answer(status: HTTPStatus, detail: str) -> bytes:
    """Return the bytes of a whole JSON answer to a request that was not read to its end."""
    body = orjson.dumps({"detail": detail})
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + body


_HEAD_TOO_LONG = _whole_answer(
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    f"the head of a request must be at most {MAX_HEAD_BYTES} bytes",
)
