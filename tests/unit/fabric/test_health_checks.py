"""Health checks of peers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.time_limits import WITHIN_S

from duplane.fabric.channel_pool import ChannelPool
from duplane.fabric.health_checks import HealthChecks

_SHORT_S = 0.05


class SlowHealth(health_pb2_grpc.HealthServicer):
    """Answers all checks once `may_answer` is set."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.check_count = 0

    async def Check(self, request: object, context: object) -> health_pb2.HealthCheckResponse:
        self.check_count += 1
        await self.may_answer.wait()
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)


@contextlib.asynccontextmanager
async def checking(health: SlowHealth) -> AsyncGenerator[tuple[HealthChecks, str]]:
    """Serve `health`, and yield checks and the address of the server."""
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    pool = ChannelPool()
    checks = HealthChecks(pool)
    try:
        yield checks, address
    finally:
        await checks.close()
        await pool.close()
        await server.stop(0)


async def test_check_does_not_end_with_another_one_that_waits_less_long() -> None:
    health = SlowHealth()
    async with checking(health) as (checks, address), asyncio.timeout(WITHIN_S):
        hasty = asyncio.create_task(checks.is_serving(address, _SHORT_S))
        patient = asyncio.create_task(checks.answers(address, WITHIN_S))
        assert not await hasty
        health.may_answer.set()
        assert await patient


async def test_equal_checks_at_the_same_time_share_a_call() -> None:
    health = SlowHealth()
    health.may_answer.set()
    async with checking(health) as (checks, address), asyncio.timeout(WITHIN_S):
        answers = await asyncio.gather(
            checks.answers(address, WITHIN_S), checks.is_serving(address, WITHIN_S)
        )
    assert answers == [True, True]
    assert health.check_count == 1
