"""Clients of a test cluster. They record their queue positions and how their connections end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
import pybase64
from support.fabric.cluster import Cluster
from support.fabric.real_fabric import Client
from support.time_limits import WITHIN_S
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from duplane.worker.models.scripted.model import Mark


@dataclass(frozen=True)
class End:
    """The last event of a connection, and its close code."""

    event: dict[str, Any]
    code: int | None


class Caller(Client):
    """A client of dialect A."""

    def __init__(self, connection: ClientConnection) -> None:
        super().__init__(connection)
        self.positions: list[int] = []
        self.granted_count = 0

    async def _next(self) -> dict[str, Any]:
        event: dict[str, Any] = orjson.loads(await self.connection.recv())
        if event["type"] in ("session.queued", "session.queue_update"):
            self.positions.append(event["position"])
        if event["type"] == "session.queue_done":
            self.granted_count += 1
        return event

    async def until_queued(self, within_s: float = WITHIN_S) -> int:
        """Wait for the next position in the queue, and return it."""
        async with asyncio.timeout(within_s):
            event = await self._next()
        assert event["type"] in ("session.queued", "session.queue_update"), event
        return event["position"]

    async def until_granted(self, within_s: float = WITHIN_S) -> None:
        """Wait for a slot, and check that the position in the queue never grew."""
        async with asyncio.timeout(within_s):
            while not self.granted_count:
                event = await self._next()
                assert event["type"].startswith("session.queue"), event
        assert self.positions == sorted(self.positions, reverse=True)

    async def begin(self, within_s: float = WITHIN_S) -> None:
        """Wait for a slot and open the conversation."""
        await self.until_granted(within_s)
        await self.configure()

    async def until_closed(self, within_s: float) -> End:
        """Read until the connection is closed; return the last event and the close code."""
        last: dict[str, Any] = {}
        async with asyncio.timeout(within_s):
            with contextlib.suppress(ConnectionClosed):
                while True:
                    last = await self._next()
        return End(last, self.connection.close_code)

    async def send_mark(self, mark: Mark) -> None:
        """Send a unit that makes the worker fail."""
        samples = np.full(16_000, mark.value, np.float32)
        audio = pybase64.b64encode(samples.tobytes()).decode()
        await self.send({"type": "input_audio_buffer.append", "audio": audio})


@contextlib.asynccontextmanager
async def calling(
    cluster: Cluster, edge: int = 0, count: int = 1
) -> AsyncGenerator[Sequence[Caller]]:
    """Connect clients one after the other."""
    async with contextlib.AsyncExitStack() as stack:
        yield [Caller(await stack.enter_async_context(cluster.connect(edge))) for _ in range(count)]


@contextlib.asynccontextmanager
async def talking(
    cluster: Cluster, edge: int = 0, count: int = 1
) -> AsyncGenerator[Sequence[Caller]]:
    """Connect clients and begin their sessions."""
    async with calling(cluster, edge, count) as callers:
        for caller in callers:
            await caller.begin()
        yield callers


@contextlib.asynccontextmanager
async def queueing(
    cluster: Cluster, edge: int = 0, count: int = 1
) -> AsyncGenerator[Sequence[Caller]]:
    """Connect clients one after the other. Each of them waits, because all slots are taken."""
    async with contextlib.AsyncExitStack() as stack:
        callers: list[Caller] = []
        for _ in range(count):
            (caller,) = await stack.enter_async_context(calling(cluster, edge))
            await caller.until_queued()
            callers.append(caller)
        yield callers


async def serve(caller: Caller, within_s: float = WITHIN_S) -> None:
    """Run a short session of one caller."""
    await caller.begin(within_s)
    await caller.exchange()
    await caller.end()
    assert caller.granted_count == 1


async def serve_next(cluster: Cluster, edge: int, within_s: float) -> None:
    """Connect a client, check that it gets a slot within `within_s`, and end its session."""
    async with calling(cluster, edge) as (caller,):
        await serve(caller, within_s)
