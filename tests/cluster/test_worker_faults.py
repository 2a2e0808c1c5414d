"""Workers that die, hang and freeze in the middle of a unit."""

from __future__ import annotations

import pytest
from support.fabric.cluster import Cluster
from support.fabric.cluster_clients import Caller, End, serve_next, talking
from support.fabric.hosts import Host
from support.fabric.servers import Server
from support.time_limits import WITHIN_S, until

from duplane.worker.models.scripted.model import Mark

pytestmark = pytest.mark.timing

LOST = End({"type": "session.closed", "reason": "error"}, 1011)


async def ended(cluster: Cluster, count: int) -> list[Server[Host]]:
    """Wait until `count` of the workers have ended, and return them."""

    def found() -> list[Server[Host]]:
        return [worker for worker in cluster.workers if not worker.is_running]

    async def have_ended() -> bool:
        return len(found()) == count

    await until(have_ended, WITHIN_S)
    return found()


async def goes_on_without_the_unit(caller: Caller) -> None:
    """Assert that a unit gets an error, and that the session then continues at another worker.

    If the unit ends its worker, the unit is sent to a second worker, but not to a third.
    """
    assert (await caller.receive())["type"] == "error"
    await caller.exchange()
    await caller.end()


async def test_unit_that_kills_its_worker_does_not_end_the_session(cluster: Cluster) -> None:
    async with talking(cluster) as (caller,):
        await caller.send_mark(Mark.KILLED_WORKER)
        await goes_on_without_the_unit(caller)
        await serve_next(cluster, 0, 10)
    assert {worker.wait() for worker in await ended(cluster, 2)} == {-9}


async def test_watchdog_ends_a_worker_whose_device_hangs(cluster: Cluster) -> None:
    """Only the device thread hangs; the event loop continues. The unit hangs two workers."""
    async with talking(cluster) as (caller,):
        await caller.send_mark(Mark.HUNG_DEVICE)
        await goes_on_without_the_unit(caller)
        await serve_next(cluster, 0, 10)
    assert not {worker.wait() for worker in await ended(cluster, 2)} & {0, -9}


async def test_slow_worker_gets_no_new_session_and_its_session_leaves_it(cluster: Cluster) -> None:
    """The unit is slow at two workers, so it is not sent to a third."""
    async with talking(cluster) as (caller,):
        await caller.send_mark(Mark.SLOW_UNIT)
        await cluster.until_count("offline_workers", 1, 10)
        await goes_on_without_the_unit(caller)
    assert all(worker.is_running for worker in cluster.workers)


async def test_session_leaves_a_worker_whose_device_is_lost(cluster: Cluster) -> None:
    async with talking(cluster) as (caller,):
        await caller.send_mark(Mark.LOST_DEVICE)
        await goes_on_without_the_unit(caller)
        await serve_next(cluster, 0, 10)
    assert not {worker.wait() for worker in await ended(cluster, 1)} & {0, -9}


async def test_failed_unit_ends_no_session(cluster: Cluster) -> None:
    async with talking(cluster, 0, 2) as (caller, other):
        await caller.send_mark(Mark.FAILED_UNIT)
        await goes_on_without_the_unit(caller)
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
