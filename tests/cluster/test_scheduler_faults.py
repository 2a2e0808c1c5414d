"""Schedulers that die and freeze, while clients talk, wait and are granted slots."""

from __future__ import annotations

import asyncio

import pytest
from support.fabric.cluster import START_S, Cluster
from support.fabric.cluster_clients import Caller, calling, queueing, serve, serve_next, talking

pytestmark = pytest.mark.timing


async def end_and_serve(talkers: list[Caller], waiting: list[Caller]) -> None:
    """End a session; check that the clients in `waiting` get the slot one after the other."""
    await talkers[0].end()
    for caller in waiting:
        await serve(caller, START_S)


async def test_queued_clients_of_a_killed_scheduler_keep_their_order(cluster: Cluster) -> None:
    async with (
        talking(cluster, 1, 4) as talkers,
        queueing(cluster, 0, 2) as early,
        queueing(cluster, 1, 1) as late,
    ):
        cluster.schedulers[0].kill()
        await end_and_serve(list(talkers), [*early, *late])


async def test_no_client_is_lost_or_granted_twice_while_schedulers_are_killed(
    cluster: Cluster,
) -> None:
    async with (
        calling(cluster, 0, 6) as left,
        calling(cluster, 1, 6) as right,
        asyncio.TaskGroup() as tasks,
    ):
        for caller in (*left, *right):
            tasks.create_task(serve(caller, 90))
        for scheduler in cluster.schedulers:
            scheduler.kill()
            scheduler.start()
            await asyncio.sleep(1)  # the time between two kills


async def test_without_schedulers_sessions_go_on_and_new_clients_are_refused(
    cluster: Cluster,
) -> None:
    async with talking(cluster, 0) as (talker,), calling(cluster, 0) as (caller,):
        await caller.until_granted()
        for scheduler in cluster.schedulers:
            scheduler.kill()
        await caller.configure()
        await caller.exchange()
        await talker.exchange()
        async with calling(cluster, 0) as (refused,):
            end = await refused.until_closed(30)
            assert end.event["error"]["code"] == "service_unavailable"
            assert end.code == 1013
        await talker.exchange()
        await talker.end()
        await caller.end()


async def test_queued_clients_outlast_the_loss_of_all_schedulers(cluster: Cluster) -> None:
    async with talking(cluster, 1, 4) as talkers, queueing(cluster, 0, 2) as waiting:
        for scheduler in cluster.schedulers:
            scheduler.kill()
        for scheduler in cluster.schedulers:
            scheduler.start()
        await end_and_serve(list(talkers), list(waiting))


async def test_frozen_scheduler_is_left_for_another(cluster: Cluster) -> None:
    for edge in (0, 1):
        await serve_next(cluster, edge, 20)  # these clients have waited at the first scheduler
    cluster.schedulers[0].freeze()
    for edge in (0, 1):
        await serve_next(cluster, edge, 20)
