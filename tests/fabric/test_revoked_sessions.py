"""A real worker closes a session whose lease is revoked, and another worker continues it."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from support.edge.live_edge import UPDATE, receive, send
from support.fabric.in_process import LocalWorker, running_edge
from support.fabric.real_fabric import Client
from support.scheduler.scheduler_harness import SchedulerHarness
from support.scheduler.watching_operator import Operator
from websockets.asyncio.client import connect

from duplane.fabric.v1 import lease_pb2

NAMES = ("one", "other")


async def holder(operator: Operator, former: str = "") -> tuple[str, str]:
    """Return the worker, other than `former`, that has a claimed lease, and the lease's id."""

    def found(seen: Operator) -> list[lease_pb2.LeaseClaims]:
        claimed = [one.claims for one in seen.leases.values() if one.is_claimed]
        return [claims for claims in claimed if claims.worker_id != former]

    await operator.until(lambda seen: bool(found(seen)))
    (claims,) = found(operator)
    return claims.worker_id, claims.lease_id


@pytest.mark.parametrize("is_open", [False, True])
async def test_session_continues_at_another_worker(*, is_open: bool) -> None:
    """A scheduler revokes a lease that was claimed too late. Here the test gives it back."""
    async with contextlib.AsyncExitStack() as stack:
        scheduler = await stack.enter_async_context(SchedulerHarness.running())
        operator = await scheduler.operator()
        for name in NAMES:
            own: dict[str, Any] = {"checkpoint": "scripted", "worker_id": name}
            worker = LocalWorker(None, schedulers=(scheduler.address,), **own)
            stack.push_async_callback(worker.drain)
        await operator.until(lambda seen: seen.workers.keys() == set(NAMES))
        edge = await stack.enter_async_context(running_edge(scheduler.address))
        url = f"ws://{edge.address}/v1/realtime?mode=audio"
        connection = await stack.enter_async_context(connect(url, proxy=None))
        client = Client(connection)
        if is_open:
            await client.begin()
            await client.exchange()
        else:
            assert (await receive(connection))["type"] == "session.queue_done"
        first, lease_id = await holder(operator)
        await scheduler.release(lease_id)
        second, _ = await holder(operator, first)
        assert {first, second} == set(NAMES)
        if not is_open:
            await send(connection, UPDATE)
            assert (await receive(connection))["type"] == "session.created"
        await client.exchange()
        await client.end()
        await operator.until(lambda seen: not seen.leases)
