"""Tests of the faults that `FaultProxy` injects into connections."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator

import pytest
from support.fabric.fault_proxy import FaultProxy
from support.time_limits import WITHIN_S

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Peers:
    """A proxy, an echoing target behind it, and how each connection ended at the target."""

    def __init__(self, proxy: FaultProxy) -> None:
        self.proxy = proxy
        self.ends: asyncio.Queue[str] = asyncio.Queue()
        self._clients: list[asyncio.StreamWriter] = []

    async def connect(self) -> Streams:
        host, _, port = self.proxy.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        self._clients.append(writer)
        return reader, writer

    async def close(self) -> None:
        for writer in self._clients:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def echo(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        end = "closed"
        try:
            while read := await reader.read(65_536):
                writer.write(read)
                await writer.drain()
        except ConnectionError:
            end = "reset"
        finally:
            writer.close()
            self.ends.put_nowait(end)


@pytest.fixture
async def peers() -> AsyncIterator[Peers]:
    async with running() as peers:
        yield peers


@contextlib.asynccontextmanager
async def running() -> AsyncGenerator[Peers]:
    proxy = FaultProxy("")
    peers = Peers(proxy)
    server = await asyncio.start_server(peers.echo, "127.0.0.1", 0)
    proxy.target = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, proxy, asyncio.timeout(2 * WITHIN_S):
        yield peers
        await peers.close()


async def exchange(streams: Streams, sent: bytes) -> bytes:
    reader, writer = streams
    writer.write(sent)
    return await reader.readexactly(len(sent))


async def test_bytes_pass_unchanged(peers: Peers) -> None:
    sent = bytes(range(256)) * 4096
    assert await exchange(await peers.connect(), sent) == sent


async def test_the_end_of_one_side_reaches_the_other(peers: Peers) -> None:
    reader, writer = await peers.connect()
    writer.write_eof()
    assert await peers.ends.get() == "closed"
    assert await reader.read() == b""


@pytest.mark.timing
async def test_delay_adds_to_each_direction_and_not_to_each_message(peers: Peers) -> None:
    streams = await peers.connect()
    await exchange(streams, b"first")
    peers.proxy.up.delay_s = peers.proxy.down.delay_s = 0.2
    began_s = time.monotonic()
    reader, writer = streams
    for _ in range(100):
        writer.write(b"message")
        await writer.drain()
        await asyncio.sleep(0.01)
    assert await reader.readexactly(100 * len(b"message")) == 100 * b"message"
    assert 0.4 <= time.monotonic() - began_s < 20.0  # the sum of all delays is 40 s


@pytest.mark.timing
async def test_bandwidth_bounds_the_rate(peers: Peers) -> None:
    streams = await peers.connect()
    peers.proxy.up.bytes_per_s = 200_000
    began_s = time.monotonic()
    await exchange(streams, bytes(100_000))
    assert time.monotonic() - began_s >= 0.4


@pytest.mark.timing
async def test_held_bytes_arrive_later_in_order(peers: Peers) -> None:
    reader, writer = await peers.connect()
    await exchange((reader, writer), b"before ")
    peers.proxy.down.hold()
    writer.write(b"held ")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await reader.read(1)
    writer.write(b"later")
    peers.proxy.down.let_go()
    assert await reader.readexactly(10) == b"held later"


@pytest.mark.timing
async def test_while_held_no_side_sees_an_end(peers: Peers) -> None:
    _, writer = await peers.connect()
    peers.proxy.hold()
    writer.write_eof()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await peers.ends.get()
    peers.proxy.let_go()
    assert await peers.ends.get() == "closed"


async def test_cut_closes_both_sides(peers: Peers) -> None:
    streams = await peers.connect()
    await exchange(streams, b"before")
    await peers.proxy.cut()
    assert await streams[0].read() == b""
    assert await peers.ends.get() == "closed"


async def test_reset_resets_both_sides(peers: Peers) -> None:
    streams = await peers.connect()
    await exchange(streams, b"before")
    await peers.proxy.reset()
    with pytest.raises(ConnectionResetError):
        await streams[0].read()
    assert await peers.ends.get() == "reset"


async def test_a_refused_connection_can_be_made_later(peers: Peers) -> None:
    old = await peers.connect()
    await exchange(old, b"before")
    await peers.proxy.refuse()
    with pytest.raises(ConnectionRefusedError):
        await peers.connect()
    assert await exchange(old, b"during") == b"during"
    await peers.proxy.listen()
    assert await exchange(await peers.connect(), b"after") == b"after"
