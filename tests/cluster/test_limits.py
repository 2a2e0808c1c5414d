"""A full queue and a pause that lasts too long."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest
from support.cluster import TICKET_LIMIT, Cluster
from support.cluster_clients import calling, queueing, talking

pytestmark = pytest.mark.timeout(240)


async def test_full_queue_refuses_the_next_client_at_any_edge(cluster: Cluster) -> None:
    half = TICKET_LIMIT // 2
    async with (
        talking(cluster, 0, 4),
        queueing(cluster, 0, half),
        queueing(cluster, 1, half),
    ):
        for edge in (0, 1):
            async with calling(cluster, edge) as (refused,):
                end = await refused.until_closed(10)
                assert end.event["error"]["code"] == "queue_full"
                assert end.code == 1013


async def test_pause_that_lasts_too_long_ends_the_session(cluster: Cluster) -> None:
    async with cluster.connect(0, "/ws/duplex/adx_pause") as connection, asyncio.timeout(20):

        async def receive() -> dict[str, Any]:
            return orjson.loads(await connection.recv())

        assert (await receive())["type"] == "queue_done"
        await connection.send(orjson.dumps({"type": "prepare"}), text=True)
        assert (await receive())["type"] == "prepared"
        await connection.send(orjson.dumps({"type": "pause", "timeout": 1}), text=True)
        assert (await receive())["type"] == "paused"
        assert (await receive())["type"] == "timeout"
