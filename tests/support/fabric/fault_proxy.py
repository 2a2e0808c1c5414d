"""A TCP proxy that can delay, slow down, hold, cut or reset its connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncGenerator, Callable

_READ_BYTES = 16 * 1024
# Maximum number of reads that wait in one direction of a connection; then the proxy stops reading.
_PENDING_READS = 256
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER of 0 s: close with RST


class Direction:
    """The faults of one direction. They may be changed while bytes flow."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.bytes_per_s: float | None = None
        self._open = asyncio.Event()
        self._open.set()

    def hold(self) -> None:
        """Deliver neither bytes nor the end of a connection."""
        self._open.clear()

    def let_go(self) -> None:
        """Deliver the held bytes in order, then deliver normally."""
        self._open.set()

    async def copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Copy bytes and the end-of-file to `writer`, with the faults of this direction."""
        pending: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_PENDING_READS)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._read(reader, pending))
            await self._write(pending, writer)

    async def _read(
        self, reader: asyncio.StreamReader, pending: asyncio.Queue[tuple[float, bytes]]
    ) -> None:
        read = b"-"
        while read:
            read = await reader.read(_READ_BYTES)
            await pending.put((asyncio.get_running_loop().time() + self.delay_s, read))

    async def _write(
        self, pending: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter
    ) -> None:
        while True:
            due_s, read = await pending.get()
            await asyncio.sleep(due_s - asyncio.get_running_loop().time())
            if self.bytes_per_s:
                await asyncio.sleep(len(read) / self.bytes_per_s)
            await self._open.wait()
            if not read:
                writer.write_eof()
                return
            writer.write(read)
            await writer.drain()


class FaultProxy:
    """Forwards connections from `address` to `target`, both as host:port.

    `up` is the direction to the target, `down` the direction from it.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self.up, self.down = Direction(), Direction()
        self.address = "127.0.0.1:0"
        self.accepted_count = 0
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], list[asyncio.StreamWriter]] = {}

    async def __aenter__(self) -> FaultProxy:
        await self.listen()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.refuse()
        await self.cut()

    async def listen(self) -> None:
        """Accept connections, always at the same address."""
        host, _, port = self.address.rpartition(":")
        self._server = await asyncio.start_server(self._accept, host, int(port))
        self.address = f"{host}:{self._server.sockets[0].getsockname()[1]}"

    async def refuse(self) -> None:
        """Refuse new connections. Existing connections stay open."""
        if self._server:
            self._server.close()
            self._server = None
            await asyncio.sleep(0)  # the event loop closes the port in its next iteration

    def hold(self) -> None:
        """Deliver nothing in both directions, as if the peer was lost without FIN or RST."""
        self.up.hold()
        self.down.hold()

    def let_go(self) -> None:
        self.up.let_go()
        self.down.let_go()

    async def cut(self) -> None:
        """Close every connection on both sides."""
        await self._end(asyncio.StreamWriter.close)

    async def reset(self) -> None:
        """Reset every connection on both sides."""

        def abort(writer: asyncio.StreamWriter) -> None:
            connection = writer.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()

        await self._end(abort)

    async def _end(self, close: Callable[[asyncio.StreamWriter], None]) -> None:
        connections = list(self._connections.items())
        for _, writers in connections:
            for writer in writers:
                close(writer)
        for task, _ in connections:
            task.cancel()
        if connections:
            await asyncio.wait([task for task, _ in connections])

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        self.accepted_count += 1
        self._connections[task] = [writer]
        try:
            # When the connection on one side is reset or cut, the connection on the other side
            # ends, too.
            with contextlib.suppress(OSError, ExceptionGroup, asyncio.CancelledError):
                async with self._connected() as (target_reader, target):
                    self._connections[task].append(target)
                    async with asyncio.TaskGroup() as tasks:
                        tasks.create_task(self.up.copy(reader, target))
                        tasks.create_task(self.down.copy(target_reader, writer))
        finally:
            writer.close()
            del self._connections[task]

    @contextlib.asynccontextmanager
    async def _connected(
        self,
    ) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        host, _, port = self.target.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            yield reader, writer
        finally:
            writer.close()
