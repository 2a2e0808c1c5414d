"""Sessions whose worker is killed or shuts down, with real processes and a scripted model."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import psutil
import pytest
from support.fabric.real_fabric import RealFabric
from support.fabric.talker import WAIT_S, Talker, begun, connected, talking, until_free
from support.time_limits import until

from duplane.worker.models.scripted.model import Mark

pytestmark = pytest.mark.timing

UNITS = 8
GAP_S = 3.0
"""Limit of the time from a unit to its answer if the worker is killed: three units."""
WORKERS = 3
FREE = WORKERS * 2
Disturb = Callable[["Talker"], Awaitable[None]]


@pytest.fixture(scope="module")
async def fabric() -> AsyncGenerator[RealFabric]:
    """A fabric of three workers with two slots each. A worker that ends is started again."""
    environment = {
        "DUPLANE_WORKERS": str(WORKERS),
        "DUPLANE_CONTINUITY": "worker",
        "DUPLANE_FAILOVER_S": str(WAIT_S),
        "DUPLANE_DRAIN_TIMEOUT_S": "0.1",
        "DUPLANE_SCRIPTED_SETTLE_S": "0.1",
        "DUPLANE_SCRIPTED_REBUILD_S": "0.2",
    }
    async with RealFabric.starting("scripted", **environment) as fabric:
        yield fabric


@pytest.fixture(scope="module")
async def undisturbed(fabric: RealFabric) -> list[dict[str, Any]]:
    """The events of a session that nothing disturbs."""
    events, _ = await told(fabric)
    assert len(events) == 2 + UNITS + 1
    return events


async def told(
    fabric: RealFabric, disturb: Disturb | None = None, at: int = 0
) -> tuple[list[dict[str, Any]], float]:
    """Return the events of a session, and the longest time from a unit to its answer.

    The session is disturbed right after the unit `at` was sent.
    """
    longest_s = 0.0
    async with talking(fabric, FREE - 2) as client:
        for number in range(UNITS):
            begin_s = time.monotonic()
            await client.send_unit()
            if disturb and number == at:
                await disturb(client)
            await client.receive()
            longest_s = max(longest_s, time.monotonic() - begin_s)
    return client.events, longest_s


async def kill(client: Talker) -> None:
    (await client.worker()).kill()


async def kill_all_workers(client: Talker) -> None:
    client.fabric.kill("worker")


async def kill_scheduler_and_worker(client: Talker) -> None:
    """Kill the only scheduler, which grants slots, and then the client's worker."""
    worker = await client.worker()
    client.fabric.kill("scheduler")
    worker.kill()


async def kill_next_worker_too(client: Talker) -> None:
    """Kill the worker, and then the next one: before its claim, in its rebuild, or soon after."""
    first = await client.worker()
    first.kill()
    told = len(client.fabric.log)

    async def has_left() -> bool:
        return "leaves worker" in "".join(client.fabric.log[told:])

    await until(has_left, WAIT_S)
    while (second := await client.worker()) == first:
        pass
    second.kill()

    async def goes_on() -> bool:
        last = [line for line in client.fabric.log[told:] if "the session " in line][-1]
        return "continues" in last and f"-{second.pid}-" not in last

    await until(goes_on, WAIT_S)


async def terminate(client: Talker) -> None:
    """End the worker, which closes its sessions when the time to drain is over."""
    worker = await client.worker()
    worker.terminate()
    await asyncio.to_thread(worker.wait, WAIT_S)


@pytest.mark.parametrize(
    ("disturb", "at", "within_s"),
    [
        (kill, 0, GAP_S),
        (kill, 4, GAP_S),
        (terminate, 4, WAIT_S),  # the worker drains first
        (kill_next_worker_too, 6, WAIT_S),
        (kill_all_workers, 4, WAIT_S),
        (kill_scheduler_and_worker, 4, WAIT_S),
    ],
)
async def test_client_notices_nothing_but_time(
    fabric: RealFabric,
    undisturbed: list[dict[str, Any]],
    disturb: Disturb,
    at: int,
    within_s: float,
) -> None:
    events, longest_s = await told(fabric, disturb, at)
    assert events == undisturbed
    assert longest_s < within_s


async def test_worker_is_killed_before_it_has_settled_a_unit_that_it_has_answered(
    fabric: RealFabric, undisturbed: list[dict[str, Any]]
) -> None:
    async with talking(fabric, FREE - 2) as client:
        for number in range(UNITS):
            worker = await client.worker() if number == 4 else None
            await client.exchange()
            if worker:
                worker.kill()
    assert client.events == undisturbed


async def test_worker_hangs_while_it_has_a_unit(
    fabric: RealFabric, undisturbed: list[dict[str, Any]]
) -> None:
    async with talking(fabric, FREE - 2) as client:
        for number in range(UNITS):
            worker = await client.worker() if number == 4 else None
            if worker:
                worker.suspend()
            await client.exchange()
            if worker:
                worker.resume()
    assert client.events == undisturbed


async def test_unit_that_is_slow_at_each_worker_is_answered_once(fabric: RealFabric) -> None:
    async with talking(fabric, FREE - 2) as client:
        before = await client.exchange()
        worker = await client.worker()
        await client.send_mark(Mark.SLOW_UNIT)
        answer = await client.receive()
        assert answer["type"] == "response.output_audio.delta"
        assert await client.worker() != worker
        after = await client.exchange()
        assert after["kv_cache_length"] == before["kv_cache_length"] + 2 * 12


async def test_worker_is_killed_again_and_again(
    fabric: RealFabric, undisturbed: list[dict[str, Any]]
) -> None:
    async with talking(fabric, FREE - 2) as client:
        for number in range(UNITS):
            if number in (2, 4, 6):
                (await client.worker()).kill()
            await client.exchange()
    assert client.events == undisturbed


async def test_unit_that_kills_two_workers_is_refused_and_the_session_goes_on(
    fabric: RealFabric,
) -> None:
    async with talking(fabric, FREE - 2) as client:
        before = await client.exchange()
        await client.send_mark(Mark.KILLED_WORKER)
        refused = await client.receive()
        assert refused["type"] == "error"
        after = await client.exchange()
        assert after["kv_cache_length"] == before["kv_cache_length"] + 12


async def test_unit_that_fails_in_the_model_does_not_end_the_session(fabric: RealFabric) -> None:
    async with talking(fabric, FREE - 2) as client:
        before = await client.exchange()
        await client.send_mark(Mark.FAILED_UNIT)
        assert (await client.receive())["type"] == "error"
        after = await client.exchange()
        assert after["kv_cache_length"] == before["kv_cache_length"] + 12


async def test_moving_sessions_come_before_those_that_wait(fabric: RealFabric) -> None:
    """All slots are in use and a client waits. The slots of a killed worker return later."""
    await until_free(fabric, FREE)
    async with contextlib.AsyncExitStack() as stack:
        clients = [await begun(fabric, stack) for _ in range(FREE)]
        for client in clients:
            await client.exchange()
        waiting = await connected(fabric, stack)
        assert (await waiting.receive())["type"] == "session.queued"
        fabric.role("worker").kill()
        for client in clients:
            await client.exchange()
        assert all(event["type"] == "session.queued" for event in waiting.events)
        await clients[0].end()
        await waiting.begin()
        await waiting.exchange()
        for client in (*clients[1:], waiting):
            await client.end()
    await until_free(fabric, FREE)


async def test_edge_with_journals_writes_no_core_dumps(fabric: RealFabric) -> None:
    assert fabric.role("edge").rlimit(psutil.RLIMIT_CORE) == (0, 0)
