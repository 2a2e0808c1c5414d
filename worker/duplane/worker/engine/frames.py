"""Frames that carry the messages between a worker and its engine process.

A frame is a head (the number of buffers, and the bytes of the body), a body (the size of each
buffer, then a pickle of protocol 5) and the buffers: the memory of large arrays, which is neither
copied into the pickle nor out of it.

Unpickling can run any code, so both ends must trust each other. They do: a worker starts its engine
process itself, with its own program and user, and no other process has an end of the socketpair.
What clients send is data in fields of the messages.
"""

from __future__ import annotations

import asyncio
import pickle
import struct
from collections.abc import Callable, Generator
from typing import cast

import numpy as np

MAX_FRAME_BYTES = 512 * 1024**2
"""Maximum size of a frame. Past units with pictures and chats with videos need up to 400 MB."""
_MAX_UNSENT_BYTES = 2 * MAX_FRAME_BYTES
_HEAD = struct.Struct("<IQ")


class Frames(asyncio.BufferedProtocol):
    """One end of the connection.

    `on_message` is called with each message, in order. `on_lost` is called once, when the other end
    is gone, a frame is not valid, or more than `_MAX_UNSENT_BYTES` wait because the other end does
    not read.
    """

    def __init__(self, on_message: Callable[[object], None], on_lost: Callable[[], None]) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._parts = self._receive()
        self._rest = next(self._parts)  # of the part that is being received
        self._transport: asyncio.WriteTransport | None = None

    def send(self, message: object) -> None:
        """Send a message; without effect when the connection is lost.

        Its arrays must not change any more. Raises ValueError if the frame is too large.
        """
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        transport.writelines(encode(message))
        if transport.get_write_buffer_size() > _MAX_UNSENT_BYTES:
            transport.abort()

    def close(self) -> None:
        """Close the connection when all messages are sent."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._on_lost()

    def get_buffer(self, sizehint: int) -> memoryview:
        del sizehint
        return self._rest

    def buffer_updated(self, nbytes: int) -> None:
        self._rest = self._rest[nbytes:]
        if not self._rest:
            self._rest = next(self._parts)

    def _receive(self) -> Generator[memoryview]:
        """Yield each part to receive, and deliver a message when all its parts are there."""
        while True:
            head = bytearray(_HEAD.size)
            yield memoryview(head)
            count, size = _HEAD.unpack(head)
            if size > MAX_FRAME_BYTES or count * 8 > size:
                raise ValueError(f"a frame has a body of {size} bytes, and {count} buffers")
            body = memoryview(bytearray(size))
            yield body
            sizes = struct.unpack_from(f"<{count}Q", body)
            if sum(sizes) > MAX_FRAME_BYTES:
                raise ValueError(f"the buffers of a frame have {sum(sizes)} bytes")
            buffers = [np.empty(size, np.uint8).data for size in sizes]
            yield from filter(len, buffers)
            self._on_message(pickle.loads(body[8 * count :], buffers=buffers))


def encode(message: object) -> list[bytes | memoryview]:
    """Return the parts of the message's frame. Raises ValueError if the frame is too large."""
    buffers: list[pickle.PickleBuffer] = []
    body = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    raw = [buffer.raw() for buffer in buffers]
    sizes = struct.pack(f"<{len(raw)}Q", *map(len, raw))
    size = len(sizes) + len(body)
    if max(size, sum(map(len, raw))) > MAX_FRAME_BYTES:
        raise ValueError(f"a message has more than {MAX_FRAME_BYTES} bytes")
    return [_HEAD.pack(len(raw), size) + sizes + body, *raw]
