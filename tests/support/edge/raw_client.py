"""WebSocket clients on plain sockets: unlike a library, they can violate the protocol."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Self

import orjson

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10
_NO_MASK = bytes(4)


def frame(
    opcode: int,
    payload: bytes = b"",
    *,
    is_last: bool = True,
    reserved: int = 0,
    mask: bytes | None = _NO_MASK,
    told_length: int | None = None,
) -> bytes:
    """Return a client's frame (RFC 6455, 5.2), invalid if the arguments make it so.

    The default mask is zero, so that the payload is unchanged; without a mask the frame is invalid.
    """
    length = len(payload) if told_length is None else told_length
    first = is_last << 7 | reserved << 4 | opcode
    masked = (mask is not None) << 7
    if length < 126:
        head = struct.pack("!BB", first, masked | length)
    elif length < 1 << 16:
        head = struct.pack("!BBH", first, masked | 126, length)
    else:
        head = struct.pack("!BBQ", first, masked | 127, length)
    if mask is None:
        return head + payload
    if mask != _NO_MASK:
        payload = bytes(byte ^ mask[at % 4] for at, byte in enumerate(payload))
    return head + mask + payload


def event(told: object) -> bytes:
    """Return a frame that holds an event."""
    return frame(TEXT, orjson.dumps(told))


def upgrade(path: str) -> bytes:
    return (
        f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    ).encode()


class RawClient:
    """A connection that reads only on request; `is_slow` gives it the smallest receive window."""

    def __init__(self, address: str, *, is_slow: bool = True) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._socket = socket.socket()
        if is_slow:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        self._socket.setblocking(False)

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        await loop.sock_connect(self._socket, (self._host, self._port))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._socket.close()

    async def send(self, data: bytes) -> None:
        """Send all of `data`. Raises OSError if the connection was cut."""
        await asyncio.get_running_loop().sock_sendall(self._socket, data)

    def send_eof(self) -> None:
        """Announce that no more bytes follow. Raises OSError if the connection was cut."""
        self._socket.shutdown(socket.SHUT_WR)

    async def read(self, size: int = 1 << 16) -> bytes:
        """Read at most `size` bytes; return b"" if the connection was closed or reset."""
        try:
            return await asyncio.get_running_loop().sock_recv(self._socket, size)
        except ConnectionError:
            return b""

    async def read_until(self, mark: bytes) -> bytes:
        """Read until the mark has arrived; the result may include bytes after the mark."""
        read = b""
        while mark not in read:
            piece = await self.read()
            assert piece, read
            read += piece
        return read

    async def read_all(self) -> bytes:
        read = b""
        while piece := await self.read():
            read += piece
        return read

    async def read_head(self) -> bytes:
        """Read the head of an HTTP answer and nothing after it."""
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            piece = await self.read(1)
            assert piece, head
            head += piece
        return head

    async def upgrade(self, path: str) -> None:
        """Upgrade the connection to a WebSocket; read the HTTP answer and nothing after it."""
        await self.send(upgrade(path))
        head = await self.read_head()
        assert head.startswith(b"HTTP/1.1 101 "), head
