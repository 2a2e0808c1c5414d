"""The proxy before the edges: it spreads connections, resets them and lets them fall silent."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import pytest
from support.ports import free_ports
from support.time_limits import WITHIN_S, until

from duplane.tools.bench.returns.balancer import Balancer


class Echo:
    """An edge that answers every line by its own name."""

    def __init__(self, name: bytes) -> None:
        self._name = name
        self.address = ""
        self._answering: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncGenerator[Echo]:
        async with await asyncio.start_server(self._answer, "127.0.0.1", 0) as server:
            self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            yield self
        if self._answering:
            await asyncio.wait(self._answering)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        self._answering.add(task)
        with contextlib.suppress(OSError):
            while await reader.readline():
                writer.write(self._name + b"\n")
        writer.close()


@contextlib.asynccontextmanager
async def balanced() -> AsyncGenerator[tuple[Balancer, Echo, Echo]]:
    async with (
        asyncio.timeout(WITHIN_S),
        Echo(b"a").serving() as first,
        Echo(b"b").serving() as second,
        Balancer.running([first.address, second.address]) as balancer,
    ):
        yield balancer, first, second


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def of(cls, balancer: Balancer) -> Client:
        host, _, port = balancer.address.rpartition(":")
        return cls(*await asyncio.open_connection(host, int(port)))

    async def ask(self) -> bytes:
        self.writer.write(b"?\n")
        return (await self.reader.readline()).strip()


async def edge_of_a_new_client(balancer: Balancer) -> bytes:
    client = await Client.of(balancer)
    try:
        return await client.ask()
    except OSError:
        return b""
    finally:
        client.writer.close()


async def test_connections_are_spread_over_edges_that_are_there() -> None:
    async with balanced() as (balancer, first, _):
        assert {await edge_of_a_new_client(balancer) for _ in range(4)} == {b"a", b"b"}
        balancer.left.add(first.address)
        assert [await edge_of_a_new_client(balancer) for _ in range(3)] == [b"b"] * 3
        balancer.left.clear()
        (port,) = free_ports(1)
        balancer.edges[1] = f"127.0.0.1:{port}"  # nobody listens there
        assert [await edge_of_a_new_client(balancer) for _ in range(3)] == [b"a"] * 3
        balancer.left.add(first.address)
        assert await edge_of_a_new_client(balancer) == b""


async def test_dropped_connections_are_reset_or_fall_silent() -> None:
    async with balanced() as (balancer, *_):
        clients = [await Client.of(balancer) for _ in range(2)]
        for client in clients:
            await client.ask()
        oldest = balancer.oldest()
        assert oldest
        oldest.reset()
        with pytest.raises(ConnectionResetError):
            await clients[0].ask()
        clients[0].writer.close()

        async def is_alone() -> bool:
            return len(balancer.connections) == 1

        await until(is_alone, WITHIN_S)
        last = balancer.oldest()
        assert last
        last.fall_silent()
        assert balancer.oldest() is None
        clients[1].writer.write(b"?\n")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await clients[1].reader.readline()
        clients[1].writer.close()
