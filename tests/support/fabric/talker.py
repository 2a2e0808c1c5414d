"""A client of a real fabric that keeps its events, to compare them with an undisturbed session."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np
import orjson
import psutil
import pybase64
from support.fabric.real_fabric import Client, RealFabric
from support.time_limits import until
from websockets.asyncio.client import connect

from duplane.worker.models.scripted.model import Mark

WAIT_S = 30.0


class Talker(Client):
    """A client of dialect A, which keeps all events."""

    def __init__(self, fabric: RealFabric, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.fabric = fabric
        self.events: list[dict[str, Any]] = []
        self.speech.reshape(-1, 16_000)[2::3] = 0.0  # a scripted model listens to silence
        self.longest_s = 0.0

    async def receive(self) -> dict[str, Any]:
        async with asyncio.timeout(WAIT_S):
            event = orjson.loads(await self.connection.recv())
        event.pop("session_id", None)
        self.events.append(event)
        return event

    async def exchange(self) -> dict[str, Any]:
        begin_s = time.monotonic()
        answer = await super().exchange()
        self.longest_s = max(self.longest_s, time.monotonic() - begin_s)
        return answer

    async def send_mark(self, mark: Mark) -> None:
        """Send a unit that makes the worker fail."""
        samples = np.full(16_000, mark.value, np.float32)
        audio = pybase64.b64encode(samples.tobytes()).decode()
        await self.send({"type": "input_audio_buffer.append", "audio": audio})

    async def worker(self) -> psutil.Process:
        """Return the process of this client's worker. No other worker may have sessions."""
        found: list[int] = []

        async def is_listed() -> bool:
            rows = (await self.fabric.get("/workers"))[1]["workers"]
            found[:] = [int(row["worker_id"].split("-")[-2]) for row in rows if row["sessions"]]
            return len(found) == 1

        await until(is_listed, WAIT_S)
        return psutil.Process(found[0])


@contextlib.asynccontextmanager
async def talking(fabric: RealFabric, free_count: int) -> AsyncGenerator[Talker]:
    """Hold a session after `free_count` slots are free. At the end, wait until no lease is held.

    The session may wait in the queue first: a scheduler that has just been restarted does not grant
    slots immediately. These events are not kept.
    """
    await until_free(fabric, free_count)
    async with connect(fabric.url, proxy=None, max_size=None) as connection:
        client = Talker(fabric, connection)
        await client.begin()
        client.events = [event for event in client.events if event["type"] != "session.queued"]
        yield client
        await client.end()
    await until_free(fabric, 0)


async def connected(fabric: RealFabric, stack: contextlib.AsyncExitStack) -> Talker:
    """Connect a client; the connection closes with `stack`."""
    connection = await stack.enter_async_context(connect(fabric.url, proxy=None, max_size=None))
    return Talker(fabric, connection)


async def begun(fabric: RealFabric, stack: contextlib.AsyncExitStack) -> Talker:
    """Begin a session; its connection closes with `stack`."""
    client = await connected(fabric, stack)
    await client.begin()
    return client


async def until_free(fabric: RealFabric, slot_count: int, lease_count: int = 0) -> None:
    """Wait until `slot_count` slots are free, `lease_count` leases held, and no client waits."""

    async def is_free() -> bool:
        status = await fabric.status()
        return (
            status.get("free_slot_count", -1) >= slot_count
            and status["lease_count"] == lease_count
            and not status["ticket_count"]
        )

    await until(is_free, WAIT_S)
