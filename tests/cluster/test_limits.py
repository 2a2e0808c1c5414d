"""Limits of a cluster: a full queue, and a pause that lasts too long."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import Any

import orjson
import pytest
from support.fabric.cluster import TICKET_LIMIT, Cluster
from support.fabric.cluster_clients import calling, queueing, serve, talking
from support.time_limits import WITHIN_S

pytestmark = pytest.mark.timing


async def check_full(cluster: Cluster) -> None:
    """Check that each edge refuses a new client because the queue is full."""
    for edge in (0, 1):
        async with calling(cluster, edge) as (refused,):
            end = await refused.until_closed(10)
            assert end.event["error"]["code"] == "queue_full"
            assert end.code == 1013


async def test_lasting_overload_refuses_new_clients_and_serves_the_queue_in_order(
    cluster: Cluster,
) -> None:
    half = TICKET_LIMIT // 2
    async with (
        talking(cluster, 0, len(cluster.workers)) as talkers,
        queueing(cluster, 0, half) as left,
        queueing(cluster, 1, half) as right,
        contextlib.AsyncExitStack() as later,
    ):
        running, waiting = deque(talkers), deque([*left, *right])
        for number in range(TICKET_LIMIT):  # the clients of the first queue take turns on the slot
            await check_full(cluster)
            await running.popleft().end()
            running.append(waiting.popleft())
            await running[-1].begin()
            waiting.extend(await later.enter_async_context(queueing(cluster, number % 2)))
        for caller in running:
            await caller.end()
        for caller in waiting:
            await serve(caller)


async def test_pause_that_lasts_too_long_ends_the_session(cluster: Cluster) -> None:
    async with cluster.connect(0, "/ws/duplex/adx_pause") as connection, asyncio.timeout(WITHIN_S):

        async def receive() -> dict[str, Any]:
            return orjson.loads(await connection.recv())

        assert (await receive())["type"] == "queue_done"
        await connection.send(orjson.dumps({"type": "prepare"}), text=True)
        assert (await receive())["type"] == "prepared"
        await connection.send(orjson.dumps({"type": "pause", "timeout": 1}), text=True)
        assert (await receive())["type"] == "paused"
        assert (await receive())["type"] == "timeout"
