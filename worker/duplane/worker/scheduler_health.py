"""Waits until a scheduler says that it accepts calls."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2

from duplane.fabric.channel import health_grpc, open_channel
from duplane.fabric.tls.credentials import FabricCredentials
from duplane.fabric.tls.identity import Role

_RETRY_S = 0.1  # between the end of a watch and the next one


async def first_serving(
    addresses: Sequence[str],
    service: str,
    timeout_s: float,
    credentials: FabricCredentials | None = None,
) -> str | None:
    """Return the first address whose health service reports `service` as SERVING.

    All addresses are watched at the same time. Returns None after `timeout_s`.
    """
    watching = {asyncio.create_task(_serving(one, service, credentials)): one for one in addresses}
    try:
        done, _ = await asyncio.wait(
            watching, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        return next((watching[task] for task in done), None)
    finally:
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)


async def _serving(address: str, service: str, credentials: FabricCredentials | None) -> None:
    """Watch the health of a scheduler until it serves; connect as often as necessary."""
    request = health_pb2.HealthCheckRequest(service=service)
    async with open_channel(address, Role.SCHEDULER, credentials) as channel:
        while True:
            try:
                async for response in health_grpc.HealthStub(channel).Watch(
                    request, wait_for_ready=True
                ):
                    if response.status == health_pb2.HealthCheckResponse.SERVING:
                        return
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    return  # the attempt to attach will show whether it serves
            await asyncio.sleep(_RETRY_S)
