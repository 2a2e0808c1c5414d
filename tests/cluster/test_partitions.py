"""Network partitions: all packets between some hosts are lost."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence

import pytest
from support.fabric.cluster import Cluster
from support.fabric.cluster_clients import End, queueing, serve, serve_next, talking
from support.fabric.hosts import Host
from support.fabric.servers import Server

pytestmark = pytest.mark.timing

LOST = End({"type": "session.closed", "reason": "error"}, 1011)


@contextlib.contextmanager
def cut(
    cluster: Cluster, some: Sequence[Server[Host]], others: Sequence[Server[Host]]
) -> Iterator[None]:
    """Cut the network between every server of one side and every server of the other side."""
    pairs = [(one.host, other.host) for one in some for other in others]
    for one, other in pairs:
        cluster.network.cut(one, other)
    try:
        yield
    finally:
        for one, other in pairs:
            cluster.network.mend(one, other)


async def test_cut_between_edge_and_workers_ends_the_session_on_both_sides(
    cluster: Cluster,
) -> None:
    async with talking(cluster, 0) as (caller,):
        with cut(cluster, cluster.edges[:1], cluster.workers):
            await caller.send_unit()
            assert await caller.until_closed(40) == LOST
            await serve_next(cluster, 1, 20)
            await cluster.settled(40)


async def test_cut_between_an_edge_and_its_scheduler_keeps_the_place_in_the_queue(
    cluster: Cluster,
) -> None:
    """The client of the cut edge misses one grant, then gets the next slot.

    After other tests, the edge may be connected to any of the three schedulers. Each cut reaches
    two of them, so one of the two cuts reaches this scheduler.
    """
    hits = [await is_hit_by_cut(cluster, cluster.schedulers[:2])]
    if not hits[0]:
        hits.append(await is_hit_by_cut(cluster, cluster.schedulers[1:]))
    assert any(hits)


async def is_hit_by_cut(cluster: Cluster, schedulers: Sequence[Server[Host]]) -> bool:
    """Cut the first edge from `schedulers` while a client waits at this edge.

    Returns whether this client missed a grant.
    """
    async with (
        talking(cluster, 1, 4) as talkers,
        queueing(cluster, 0) as (first,),
        queueing(cluster, 1) as (second,),
        asyncio.TaskGroup() as tasks,
    ):
        with cut(cluster, cluster.edges[:1], schedulers):
            granted = [tasks.create_task(caller.until_granted(40)) for caller in (first, second)]
            await talkers[0].end()
            await asyncio.wait(granted, return_when=asyncio.FIRST_COMPLETED)
            is_hit = not granted[0].done()
            await talkers[1].end()
            await asyncio.gather(*granted)
            for caller in (first, second):
                await serve(caller)
    return is_hit


async def test_cut_between_workers_and_a_scheduler_is_not_noticed_by_clients(
    cluster: Cluster,
) -> None:
    async with talking(cluster, 0, 2) as talkers:
        with cut(cluster, cluster.schedulers[:1], cluster.workers):
            await cluster.until_count("free_slot_count", 2, 40)
            for talker in talkers:
                await talker.exchange()
            await serve_next(cluster, 0, 30)
            for talker in talkers:
                await talker.end()


async def test_cut_between_a_scheduler_and_etcd_leaves_the_others_at_work(
    cluster: Cluster,
) -> None:
    async with talking(cluster, 0) as (talker,):
        with cut(cluster, cluster.schedulers[:1], cluster.etcd):
            await serve_next(cluster, 0, 40)
            await serve_next(cluster, 1, 40)
            await talker.exchange()
            await talker.end()


async def test_schedulers_cut_off_from_etcd_lose_their_workers_and_queue_to_the_others(
    cluster: Cluster,
) -> None:
    """The cut lasts for the whole test, so workers and callers must go to another scheduler."""
    async with (
        talking(cluster, 1, len(cluster.workers)) as talkers,
        queueing(cluster, 0, 2) as early,
        queueing(cluster, 1, 1) as late,
    ):
        with cut(cluster, cluster.schedulers[:2], cluster.etcd):
            await talkers[0].end()
            for caller in (*early, *late):
                await serve(caller, 60)
            for talker in talkers[1:]:
                await talker.exchange()
                await talker.end()
            await cluster.settled(60)
