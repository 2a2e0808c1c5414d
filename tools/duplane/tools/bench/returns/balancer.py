"""A TCP proxy before edges: spreads connections over them, resets them, lets them fall silent."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from collections.abc import AsyncGenerator

_READ_BYTES = 64 * 1024
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER of 0 s: close with RST
# A silent connection is closed after this time: the edge has then noticed by its pings.
_SILENT_S = 60.0
_CONNECT_S = 1.0


class Connection:
    """One forwarded connection."""

    def __init__(
        self,
        client: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        edge: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        self.began_s = time.monotonic()
        self._directions = ((client[0], edge[1]), (edge[0], client[1]))
        self._silence = asyncio.Event()

    @property
    def is_silent(self) -> bool:
        """Whether the connection forwards nothing, and tells neither side."""
        return self._silence.is_set()

    async def run(self) -> None:
        """Forward until one side ends, or the connection was silent for a while."""
        copies = {asyncio.create_task(_copy(*direction)) for direction in self._directions}
        silence = asyncio.create_task(self._silence.wait())
        try:
            await asyncio.wait({*copies, silence}, return_when=asyncio.FIRST_COMPLETED)
            if self.is_silent:
                await _cancelled(copies)
                await asyncio.sleep(_SILENT_S)
        finally:
            for _, writer in self._directions:
                _abort(writer)
            await _cancelled({*copies, silence})

    def fall_silent(self) -> None:
        """Forward nothing any more, without an end of the connection."""
        self._silence.set()

    def reset(self) -> None:
        """End both sides with RST."""
        for _, writer in self._directions:
            with contextlib.suppress(OSError):
                found = writer.get_extra_info("socket")
                found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            _abort(writer)


def _abort(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()
    writer.close()  # uvloop does not count an aborted transport as closed


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while read := await reader.read(_READ_BYTES):
            writer.write(read)
            await writer.drain()


async def _cancelled(tasks: set[asyncio.Task[None]] | set[asyncio.Task[object]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


class Balancer:
    """Forwards each connection to the next of the `edges` that accepts it and is not `left`."""

    def __init__(self, edges: list[str]) -> None:
        self.edges = edges
        self.left: set[str] = set()
        self.address = ""
        self.connections: dict[asyncio.Task[None], Connection] = {}
        self._turn = 0

    @classmethod
    @contextlib.asynccontextmanager
    async def running(cls, edges: list[str]) -> AsyncGenerator[Balancer]:
        """Listen on a free port of this machine."""
        balancer = cls(edges)
        server = await asyncio.start_server(balancer._accept, "127.0.0.1", 0)
        balancer.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield balancer
        finally:
            server.close()
            if tasks := set(balancer.connections):
                await _cancelled(tasks)

    def oldest(self) -> Connection | None:
        """Return the connection that has been forwarded for the longest time."""
        live = (one for one in self.connections.values() if not one.is_silent)
        return min(live, key=lambda one: one.began_s, default=None)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        edge = await self._connected()
        task = asyncio.current_task()
        if edge is None or task is None:
            _abort(writer)
            return
        self.connections[task] = connection = Connection((reader, writer), edge)
        try:
            await connection.run()
        except asyncio.CancelledError:
            pass  # the run is over
        finally:
            del self.connections[task]

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        for _ in self.edges:
            self._turn += 1
            address = self.edges[self._turn % len(self.edges)]
            if address in self.left:
                continue
            host, _, port = address.rpartition(":")
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(_CONNECT_S):
                    return await asyncio.open_connection(host, int(port))
        return None
