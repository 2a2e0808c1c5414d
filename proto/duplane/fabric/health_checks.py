"""Checks whether schedulers and workers answer their health service."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2

from duplane.fabric.channel import health_grpc
from duplane.fabric.channel_pool import ChannelPool

TIME_LIMIT_S = 0.5
"""A usual time limit of a health check."""
UNREACHABLE_CODES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class HealthChecks:
    """Checks peers over the channels of a pool.

    Checks of a peer at the same time share a call if their time limits are equal.
    """

    def __init__(self, pool: ChannelPool) -> None:
        self._pool = pool
        # By address and time limit in seconds.
        self._running: dict[tuple[str, float], asyncio.Task[tuple[bool, bool]]] = {}

    async def answers(self, address: str, within_s: float) -> bool:
        """Return whether a peer answers a health check at all, whatever the answer is."""
        return (await self._check(address, within_s))[0]

    async def is_serving(self, address: str, within_s: float) -> bool:
        """Return whether a peer answers a health check with SERVING."""
        return (await self._check(address, within_s))[1]

    async def close(self) -> None:
        """End the checks that still run. Their callers are cancelled."""
        running = list(self._running.values())
        for check in running:
            check.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _check(self, address: str, within_s: float) -> tuple[bool, bool]:
        key = address, within_s
        check = self._running.get(key)
        if check is None:
            check = self._running[key] = asyncio.create_task(self._call(address, within_s))
            check.add_done_callback(lambda _: self._running.pop(key))
        return await asyncio.shield(check)

    async def _call(self, address: str, within_s: float) -> tuple[bool, bool]:
        """Return whether the peer answers, and whether it serves."""
        try:
            async with self._pool.use(address) as channel:
                answer = await health_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(), timeout=within_s
                )
        except grpc.aio.AioRpcError as error:
            return error.code() not in UNREACHABLE_CODES, False
        return True, answer.status == health_pb2.HealthCheckResponse.SERVING
