"""Frames that carry the messages between a worker and its engine process.

A frame is a head (the number of buffers, and the bytes of the body), a body (the size of each
buffer, then a pickle of protocol 5) and the buffers: the memory of large arrays, which is neither
copied into the pickle nor out of it.

A frame is sent in pieces. Those of one slot follow each other, but frames of other slots may come
between them. So the pictures of one session delay the units of the others only by a few pieces.

Unpickling can run any code, so both ends must trust each other. They do: a worker starts its engine
process itself, with its own program and user, and no other process has an end of the socketpair.
What clients send is data in fields of the messages.
"""

from __future__ import annotations

import asyncio
import pickle
import struct
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, cast

import numpy as np

MAX_FRAME_BYTES = 512 * 1024**2
"""Maximum size of a frame. Past units with pictures and chats with videos need up to 400 MB."""
_MAX_UNSENT_BYTES = 2 * MAX_FRAME_BYTES
_PIECE_BYTES = 256 * 1024
_ALL_SLOTS = -1
_HEAD = struct.Struct("<IQ")
_PIECE = struct.Struct("<iI")  # slot, bytes


class Frames(asyncio.BufferedProtocol):
    """One end of the connection.

    `on_message` is called with each message; messages of one slot keep their order. `on_lost` is
    called once, when the other end is gone, a frame is not valid, or more than `_MAX_UNSENT_BYTES`
    wait because the other end does not read.
    """

    def __init__(self, on_message: Callable[[object], None], on_lost: Callable[[], None]) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._transport: asyncio.WriteTransport | None = None
        self._is_paused = False
        # Pieces that are not given to the transport yet, by slot. The first slot has the next one.
        self._waiting: dict[int, deque[memoryview]] = {}
        self._waiting_bytes = 0
        self._streams: dict[int, _Stream] = {}
        self._stream: _Stream | None = None  # of the piece that is being received
        self._left = 0  # bytes of this piece
        self._head = bytearray(_PIECE.size)
        self._head_rest = memoryview(self._head)

    def send(self, message: object, slot: int = _ALL_SLOTS) -> None:
        """Send a message; without effect when the connection is lost.

        Its arrays must not change any more. Raises ValueError if the frame is too large.
        """
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        parts = encode(message)
        size = sum(map(len, parts))
        if size <= _PIECE_BYTES and slot not in self._waiting:
            transport.writelines([_PIECE.pack(slot, size), *parts])
        else:
            pieces = self._waiting.setdefault(slot, deque())
            for part in parts:
                starts = range(0, len(part), _PIECE_BYTES)
                pieces.extend(part[start : start + _PIECE_BYTES] for start in starts)
            self._waiting_bytes += size
            self._write()
        if self._waiting_bytes + transport.get_write_buffer_size() > _MAX_UNSENT_BYTES:
            transport.abort()

    def close(self) -> None:
        """Close the connection when the small messages are sent; the pieces of others are lost."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)
        self._transport.set_write_buffer_limits(_PIECE_BYTES)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._waiting.clear()
        self._on_lost()

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        self._write()

    def _write(self) -> None:
        """Write pieces, of each slot in turn, while the transport takes them."""
        while self._waiting and self._transport and not self._is_paused:
            slot, pieces = next(iter(self._waiting.items()))
            del self._waiting[slot]
            piece = pieces.popleft()
            if pieces:
                self._waiting[slot] = pieces
            self._waiting_bytes -= len(piece)
            self._transport.writelines([_PIECE.pack(slot, len(piece)), piece])

    def get_buffer(self, sizehint: int) -> memoryview:
        del sizehint
        return self._stream.rest[: self._left] if self._stream else self._head_rest

    def buffer_updated(self, nbytes: int) -> None:
        if self._stream:
            self._left -= nbytes
            self._stream.fill(nbytes)
            if not self._left:
                self._stream = None
            return
        self._head_rest = self._head_rest[nbytes:]
        if not self._head_rest:
            slot, self._left = _PIECE.unpack(self._head)
            self._head_rest = memoryview(self._head)
            if slot not in self._streams:
                self._streams[slot] = _Stream(self._on_message)
            self._stream = self._streams[slot]


class _Stream:
    """Puts together the frames of one slot. `rest` is where the next bytes belong."""

    def __init__(self, on_message: Callable[[object], None]) -> None:
        self._parts = self._receive(on_message)
        self.rest = next(self._parts)

    def fill(self, count: int) -> None:
        """Note that `count` bytes of `rest` have come."""
        self.rest = self.rest[count:]
        if not self.rest:
            self.rest = next(self._parts)

    def _receive(self, on_message: Callable[[object], None]) -> Generator[memoryview]:
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
            on_message(pickle.loads(body[8 * count :], buffers=buffers))


def deliver(receiver: object, message: Any) -> None:
    """Call the method `receive_NAME` of the receiver for a message `(NAME, *arguments)`."""
    name, *arguments = message
    getattr(receiver, f"receive_{name}")(*arguments)


def encode(message: object) -> list[memoryview]:
    """Return the parts of the message's frame. Raises ValueError if the frame is too large."""
    buffers: list[pickle.PickleBuffer] = []
    body = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    raw = [buffer.raw() for buffer in buffers]
    sizes = struct.pack(f"<{len(raw)}Q", *map(len, raw))
    size = len(sizes) + len(body)
    if max(size, sum(map(len, raw))) > MAX_FRAME_BYTES:
        raise ValueError(f"a message has more than {MAX_FRAME_BYTES} bytes")
    return [memoryview(_HEAD.pack(len(raw), size) + sizes + body), *raw]
