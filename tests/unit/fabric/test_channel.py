"""The options of channels exist in gRPC, which ignores unknown names without an error."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc._cython import cygrpc
from grpc_health.v1 import health_pb2
from support.time_limits import WITHIN_S

from duplane.fabric import channel

OPTIONS = {
    name
    for name, _ in (
        *channel.CLIENT_OPTIONS,
        *channel.SERVER_OPTIONS,
        ("grpc.max_concurrent_streams", 0),
    )
}


@pytest.fixture(scope="module")
def core() -> bytes:
    assert cygrpc.__file__
    return Path(cygrpc.__file__).read_bytes()


@pytest.mark.parametrize("option", sorted(OPTIONS))
def test_option_is_one_that_grpc_knows(core: bytes, option: str) -> None:
    assert option.encode() + b"\0" in core


def test_server_allows_the_pings_of_clients() -> None:
    server, client = dict(channel.SERVER_OPTIONS), dict(channel.CLIENT_OPTIONS)
    allowed_ms = server["grpc.http2.min_ping_interval_without_data_ms"]
    assert allowed_ms < client["grpc.keepalive_time_ms"]


async def test_server_refuses_calls_above_its_limit_and_keeps_those_that_run() -> None:
    limits = channel.CallLimits(total=2, per_connection=10)
    server = channel.FabricServer(limits=limits)
    address = await server.start("127.0.0.1:0")
    request = health_pb2.HealthCheckRequest()
    try:
        async with channel.open_channel(address) as opened, asyncio.timeout(WITHIN_S):
            stub = channel.health_grpc.HealthStub(opened)
            watches = [stub.Watch(request) for _ in range(limits.total)]
            for watch in watches:
                await watch.read()
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Check(request)
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            await server.set_serving(False)
            for watch in watches:
                assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
                watch.cancel()
    finally:
        await server.stop(0)


async def test_call_above_the_limit_of_its_connection_waits_and_another_connection_does_not() -> (
    None
):
    server = channel.FabricServer(limits=channel.CallLimits(total=10, per_connection=1))
    address = await server.start("127.0.0.1:0")
    request = health_pb2.HealthCheckRequest()
    try:
        async with (
            channel.open_channel(address) as one,
            channel.open_channel(address) as other,
            asyncio.timeout(WITHIN_S),
        ):
            watch = channel.health_grpc.HealthStub(one).Watch(request)
            await watch.read()
            waiting = channel.health_grpc.HealthStub(one).Check(request)
            await channel.health_grpc.HealthStub(other).Check(request)
            assert not waiting.done(), "the call must wait for the first one"
            watch.cancel()
            await waiting
    finally:
        await server.stop(0)
