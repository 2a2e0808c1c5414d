"""Rolling restarts: processes are stopped in order and started again, one after the other."""

from __future__ import annotations

import signal

import pytest
from support.fabric.cluster import START_S, Cluster
from support.fabric.cluster_clients import serve_next, talking
from support.time_limits import WITHIN_S, until

pytestmark = pytest.mark.timing


async def test_schedulers_and_etcd_restart_without_a_lost_session(cluster: Cluster) -> None:
    free_count = len(cluster.workers) - 2
    async with talking(cluster, 0) as (one,), talking(cluster, 1) as (other,):
        for server in (*cluster.schedulers, *cluster.etcd):
            server.send(signal.SIGTERM)
            server.wait()
            await one.exchange()
            await other.exchange()
            server.start()
            await cluster.until_count("free_slot_count", free_count, START_S)
            await serve_next(cluster, 0, START_S)
        await one.end()
        await other.end()


async def test_draining_workers_end_their_sessions_first(cluster: Cluster) -> None:
    for worker in cluster.workers:  # a drain would wait for copies of sessions of earlier tests
        worker.kill()
    await cluster.repair()
    async with talking(cluster) as (caller,):
        for worker in cluster.workers:
            worker.send(signal.SIGTERM)

        async def is_last() -> bool:
            return sum(worker.is_running for worker in cluster.workers) == 1

        await until(is_last, WITHIN_S)
        await caller.exchange()
        await caller.end()
    assert [worker.wait() for worker in cluster.workers] == [0] * len(cluster.workers)
