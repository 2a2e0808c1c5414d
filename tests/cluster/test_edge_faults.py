"""Edges that die, drain and freeze."""

from __future__ import annotations

import signal

import pytest
from support.fabric.cluster import Cluster
from support.fabric.cluster_clients import queueing, serve, serve_next, talking
from support.time_limits import WITHIN_S, until

pytestmark = pytest.mark.timing


async def test_killed_edge_gives_its_slots_back_and_its_clients_find_another(
    cluster: Cluster,
) -> None:
    async with talking(cluster, 0) as (caller,):
        await caller.exchange()
        cluster.edges[0].kill()
        assert (await caller.until_closed(5)).code == 1006
        await serve_next(cluster, 1, 10)


async def test_draining_edge_refuses_new_clients_and_ends_sessions_with_a_reason(
    cluster: Cluster,
) -> None:
    edge = cluster.edges[0]
    async with talking(cluster, 0) as (caller,):
        edge.send(signal.SIGTERM)

        async def is_draining() -> bool:
            return (await cluster.get(edge, "/ready"))[0] in (0, 503)

        await until(is_draining, WITHIN_S)
        await caller.exchange()
        end = await caller.until_closed(15)
        assert end.event == {"type": "session.closed", "reason": "server_shutdown"}
        assert end.code == 1001
    assert edge.wait() == 0


async def test_grant_to_a_frozen_edge_goes_to_the_next_client_and_the_first_stays_first(
    cluster: Cluster,
) -> None:
    edge = cluster.edges[0]
    async with (
        talking(cluster, 1, 4) as talkers,
        queueing(cluster, 0) as (first,),
        queueing(cluster, 1) as (second,),
        queueing(cluster, 1) as (third,),
    ):
        edge.freeze()
        await talkers[0].end()
        # The frozen edge does not claim the first client's grant in time, so the second client gets
        # the slot.
        await second.begin()
        edge.thaw()
        await cluster.until_count("ticket_count", 2)  # the first edge is back
        await talkers[1].end()
        await serve(first)
        await serve(third)
