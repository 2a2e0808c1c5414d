"""A worker process that hangs: the signal SIGSTOP stops it, SIGCONT continues it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Iterator
from datetime import UTC, datetime
from typing import Any

import orjson
import psutil
import pytest
from support.fabric.real_fabric import Client, RealFabric
from support.time_limits import WITHIN_S, until
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

pytestmark = pytest.mark.timing

NOTICED_WITHIN_S = 20.0  # from the stop to the end of a call, and to /ready 503
REPORT_INTERVAL_S = 2.0  # the scheduler's default
CLOCK_S = 3.0  # possible error of measured times on a loaded machine


@pytest.fixture(scope="module")
async def fabric() -> AsyncGenerator[RealFabric]:
    async with RealFabric.running() as fabric:
        yield fabric


@contextlib.contextmanager
def hung(worker: psutil.Process) -> Iterator[None]:
    """Stop the worker during the body of the `with`."""
    worker.suspend()
    try:
        yield
    finally:
        worker.resume()


async def seconds(wait: Awaitable[object]) -> float:
    """Return the seconds that a wait takes."""
    begin_s = time.monotonic()
    await wait
    return time.monotonic() - begin_s


async def until_closed(connection: ClientConnection) -> dict[str, Any]:
    """Return the last event before the end of the connection."""
    event: dict[str, Any] = {}
    with contextlib.suppress(ConnectionClosed):
        while True:
            event = orjson.loads(await connection.recv())
    return event


async def until_ready(fabric: RealFabric, code: int) -> None:
    """Wait until `/ready` is answered with this status."""

    async def is_answered() -> bool:
        return (await fabric.get("/ready"))[0] == code

    await until(is_answered, WITHIN_S)


async def listed(fabric: RealFabric) -> dict[str, Any]:
    """Return the worker as `/workers` lists it."""
    (row,) = (await fabric.get("/workers"))[1]["workers"]
    return row


async def serves_again(fabric: RealFabric) -> None:
    """Assert that the worker comes back with all slots and accepts a session."""
    await until_ready(fabric, 200)
    await fabric.all_free()
    row = await listed(fabric)
    assert (row["status"], row["is_silent"], row["is_unreachable"]) == ("idle", False, False)
    async with connect(fabric.url, proxy=None) as connection:
        client = Client(connection)
        await client.begin()
        await client.exchange()
        await client.end()
    await fabric.all_free()


async def test_session_on_a_worker_that_hangs_ends_within_seconds(fabric: RealFabric) -> None:
    async with connect(fabric.url, proxy=None) as connection:
        client = Client(connection)
        await client.begin()
        await client.exchange()
        with hung(fabric.role("worker")):
            await client.send_unit()
            took_s = await seconds(client_end := asyncio.ensure_future(until_closed(connection)))
            assert client_end.result() == {"type": "session.closed", "reason": "error"}
            assert connection.close_code == 1011
    assert took_s < NOTICED_WITHIN_S
    await serves_again(fabric)


async def test_chat_on_a_worker_that_hangs_ends_within_seconds(fabric: RealFabric) -> None:
    request = {
        "messages": [{"role": "user", "content": "Hello!"}],
        "streaming": True,
        "generation": {"max_new_tokens": 8000},
    }
    async with connect(f"ws://{fabric.edge}/ws/chat", proxy=None) as connection:
        await connection.send(orjson.dumps(request), text=True)
        while orjson.loads(await connection.recv())["type"] != "chunk":
            pass
        with hung(fabric.role("worker")):
            took_s = await seconds(client_end := asyncio.ensure_future(until_closed(connection)))
            assert client_end.result() == {"type": "error", "error": "the worker was lost"}
            assert connection.close_code == 1000
    assert took_s < NOTICED_WITHIN_S
    await serves_again(fabric)


async def test_worker_that_hangs_is_silent_for_operators(fabric: RealFabric) -> None:
    async def is_silent() -> bool:
        return (await listed(fabric))["is_silent"]

    with hung(fabric.role("worker")):
        begin_s = time.monotonic()
        await until_ready(fabric, 503)
        assert time.monotonic() - begin_s < NOTICED_WITHIN_S
        await until(is_silent, WITHIN_S)
        row, now = await listed(fabric), datetime.now(UTC)
        hung_s = time.monotonic() - begin_s
        age_s = (now - datetime.fromisoformat(row["last_heartbeat"])).total_seconds()
        assert -CLOCK_S < age_s - hung_s < REPORT_INTERVAL_S + CLOCK_S
        assert row["status"] == "offline"
        status = await fabric.status()
        assert (status["free_slot_count"], status["offline_workers"]) == (0, 1)
    await serves_again(fabric)
