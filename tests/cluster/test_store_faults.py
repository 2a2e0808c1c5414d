"""Members of etcd that die and freeze."""

from __future__ import annotations

import pytest
from support.fabric.cluster import Cluster
from support.fabric.cluster_clients import calling, queueing, serve, serve_next, talking

pytestmark = pytest.mark.timing


async def test_killed_leader_only_delays_a_grant(cluster: Cluster) -> None:
    async with talking(cluster, 0) as (talker,):
        (await cluster.leader()).kill()
        await talker.exchange()
        await serve_next(cluster, 0, 20)
        await talker.end()


async def test_frozen_leader_only_delays_a_grant_and_its_return_harms_nothing(
    cluster: Cluster,
) -> None:
    async with talking(cluster, 0, 3) as talkers:
        leader = await cluster.leader()
        leader.freeze()
        await serve_next(cluster, 0, 30)
        leader.thaw()
        await serve_next(cluster, 1, 30)
        for talker in talkers:
            await talker.exchange()
            await talker.end()


async def test_without_quorum_sessions_go_on_and_the_queue_keeps_its_order(
    cluster: Cluster,
) -> None:
    async with talking(cluster, 1, 4) as talkers, queueing(cluster, 0, 2) as (first, second):
        for member in cluster.etcd[:2]:
            member.kill()
        for talker in talkers:
            await talker.exchange()
        async with calling(cluster, 0) as (refused,):
            end = await refused.until_closed(30)
            assert end.event["error"]["code"] == "service_unavailable"
        await talkers[0].end()
        for member in cluster.etcd[:2]:
            member.start()
        await serve(first, 60)
        await serve(second, 60)
