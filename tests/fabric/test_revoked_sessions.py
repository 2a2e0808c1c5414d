"""A real worker closes a session whose lease is revoked, and another worker continues it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import grpc.aio
import pytest
from support.edge.live_edge import UPDATE, closed, receive, send
from support.fabric.in_process import LocalWorker, running_edge
from support.fabric.real_fabric import Client
from support.scheduler.scheduler_harness import SchedulerHarness
from support.scheduler.watching_operator import Operator
from websockets.asyncio.client import connect

from duplane.fabric.errors import Reason, from_rpc
from duplane.fabric.v1 import admin_pb2, lease_pb2

NAMES = ("one", "other")


async def holder(operator: Operator, former: str = "") -> tuple[str, str]:
    """Return the worker, other than `former`, that has a claimed lease, and the lease's id."""

    def found(seen: Operator) -> list[lease_pb2.LeaseClaims]:
        claimed = [one.claims for one in seen.leases.values() if one.is_claimed]
        return [claims for claims in claimed if claims.worker_id != former]

    await operator.until(lambda seen: bool(found(seen)))
    (claims,) = found(operator)
    return claims.worker_id, claims.lease_id


@contextlib.asynccontextmanager
async def fabric() -> AsyncGenerator[tuple[SchedulerHarness, Operator, Client]]:
    """Run a scheduler, two workers and an edge with one client."""
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
        yield scheduler, operator, Client(connection)


@pytest.mark.parametrize("is_open", [False, True])
async def test_session_continues_at_another_worker(*, is_open: bool) -> None:
    """A scheduler revokes a lease that was claimed too late. Here the test gives it back."""
    async with fabric() as (scheduler, operator, client):
        connection = client.connection
        if is_open:
            await client.begin()
            await client.exchange()
        else:
            assert (await receive(connection))["type"] == "session.queue_done"
        first, lease_id = await holder(operator)
        await scheduler.revoke(lease_id)
        second, _ = await holder(operator, first)
        assert {first, second} == set(NAMES)
        if not is_open:
            await send(connection, UPDATE)
            assert (await receive(connection))["type"] == "session.created"
        await client.exchange()
        await client.end()
        await operator.until(lambda seen: not seen.leases)


async def test_session_that_an_operator_ends_does_not_continue() -> None:
    async with fabric() as (_, operator, client):
        await client.begin()
        await client.exchange()
        _, lease_id = await holder(operator)
        await operator.stub.EndSession(admin_pb2.EndSessionRequest(lease_id=lease_id))
        ended = {"type": "session.closed", "reason": "server_shutdown"}
        assert await client.receive() == ended
        await closed(client.connection, 1001)
        assert client.connection.close_reason == "ended by an operator"
        await operator.until(lambda seen: not seen.leases)
        assert not [
            one for one in operator.steps if one.lease.claims.lease_id not in ("", lease_id)
        ]


@pytest.mark.parametrize(
    ("fields", "reason", "field"),
    [
        ({}, Reason.INVALID_FIELD, "session_id"),
        ({"session_id": "s", "lease_id": "l"}, Reason.INVALID_FIELD, "session_id"),
        ({"session_id": "nobody"}, Reason.UNKNOWN_SESSION, "session_id"),
        ({"lease_id": "nobody"}, Reason.UNKNOWN_SESSION, "lease_id"),
    ],
)
async def test_end_of_no_session_is_refused(
    fields: dict[str, str], reason: Reason, field: str
) -> None:
    async with SchedulerHarness.running() as scheduler:
        await (await scheduler.caller()).stands(1)  # its session is unnamed
        operator = await scheduler.operator()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await operator.stub.EndSession(admin_pb2.EndSessionRequest(**fields))
        failure = from_rpc(refused.value)
        assert (failure.reason, failure.field) == (reason, field)
