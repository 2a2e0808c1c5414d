"""Workers that die, hang and freeze in the middle of a unit."""

from __future__ import annotations

import pytest
from support.cluster import Cluster, Server, until
from support.cluster_clients import End, serve_next, talking
from support.time_limits import WITHIN_S

from duplane.worker.engine.scripted_model import Mark

pytestmark = pytest.mark.timeout(240)

LOST = End({"type": "session.closed", "reason": "error"}, 1011)


async def ended(cluster: Cluster) -> Server:
    """Wait until one of the workers has ended, and return it."""

    async def has_ended() -> bool:
        return any(not worker.is_running for worker in cluster.workers)

    await until(has_ended, WITHIN_S)
    return next(worker for worker in cluster.workers if not worker.is_running)


async def test_client_of_a_worker_killed_in_a_unit_is_informed_at_once(cluster: Cluster) -> None:
    async with talking(cluster) as (caller,):
        await caller.send_mark(Mark.KILLED_WORKER)
        assert await caller.until_closed(3) == LOST
        await serve_next(cluster, 0, 10)
    assert (await ended(cluster)).wait() == -9


async def test_watchdog_ends_a_worker_whose_device_hangs(cluster: Cluster) -> None:
    """Only the device thread of this worker hangs; its event loop continues."""
    async with talking(cluster) as (caller,):
        await caller.send_mark(Mark.HUNG_DEVICE)
        assert await caller.until_closed(25) == LOST
        await serve_next(cluster, 0, 10)
    assert (await ended(cluster)).wait() not in (0, -9)


async def test_slow_worker_gets_no_new_session_and_keeps_the_one_it_has(cluster: Cluster) -> None:
    async with talking(cluster) as (caller,):
        await caller.send_mark(Mark.SLOW_UNIT)
        await cluster.until_count("offline_workers", 1, 10)
        answer = await caller.receive()
        assert answer["type"] == "response.output_audio.delta"
        await caller.exchange()
        await caller.end()
    assert all(worker.is_running for worker in cluster.workers)


async def test_worker_whose_device_is_lost_ends_with_its_sessions(cluster: Cluster) -> None:
    async with talking(cluster) as (caller,):
        await caller.send_mark(Mark.LOST_DEVICE)
        assert await caller.until_closed(10) == LOST
        await serve_next(cluster, 0, 10)
    assert (await ended(cluster)).wait() not in (0, -9)


async def test_failed_unit_ends_only_its_session(cluster: Cluster) -> None:
    async with talking(cluster, 0, 2) as (caller, other):
        await caller.send_mark(Mark.FAILED_UNIT)
        assert await caller.until_closed(5) == LOST
        await other.exchange()
        await other.end()
    assert all(worker.is_running for worker in cluster.workers)


async def test_frozen_workers_lose_their_sessions_and_come_back(cluster: Cluster) -> None:
    async with talking(cluster) as (caller,):
        for worker in cluster.workers:
            worker.freeze()
        await caller.send_unit()
        assert await caller.until_closed(30) == LOST
        for worker in cluster.workers:
            worker.thaw()
        await serve_next(cluster, 0, 30)
