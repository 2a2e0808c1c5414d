"""A scheduler process with a long queue: the backlog of one tenant delays another by one grant."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import grpc.aio
import pytest
from support.fabric.servers import DUPLANE, Loopback, Server
from support.ports import free_ports
from support.scheduler.scheduler_harness import AUDIO, Caller, FakeWorker, register_message

from duplane.fabric.channel import open_channel
from duplane.fabric.v1 import lease_pb2

BACKLOG = 1000
CHANNELS = 10


@contextlib.asynccontextmanager
async def channels_to_process(log: Path) -> AsyncGenerator[Sequence[grpc.aio.Channel]]:
    """Run a scheduler whose queue takes 10,000 sessions; yield channels to it."""
    (port,) = free_ports(1)
    command = (*DUPLANE, "scheduler", "--listen", f"127.0.0.1:{port}", "--ticket-limit", "10000")
    server = Server("scheduler", Loopback(), port, command, log)
    server.start()
    channels = [open_channel(server.address) for _ in range(CHANNELS)]
    try:
        yield channels
    finally:
        for channel in channels:
            await channel.close()
        server.kill()


@pytest.mark.slow
async def test_tenant_with_1000_waiting_sessions_delays_another_by_one_grant(
    tmp_path: Path,
) -> None:
    async with channels_to_process(tmp_path / "log") as channels:

        def call(tenant_id: str, number: int) -> Caller:
            request = lease_pb2.AcquireLeaseRequest(
                request_id=f"{tenant_id}{number}", kind=AUDIO, tenant_id=tenant_id
            )
            return Caller(channels[number % CHANNELS], request)

        await channels[0].channel_ready()
        worker = FakeWorker(channels[0], register_message())
        await worker.attach()
        await worker.claim(await call("busy", 0).granted())
        first = call("busy", 1)
        await first.stands(1)
        backlog = [call("busy", number) for number in range(2, BACKLOG + 1)]
        for caller in backlog:
            await caller.read()
        assert max(caller.position for caller in backlog) == BACKLOG
        newcomer = call("new", 0)
        await newcomer.stands(2)
        await worker.finish(0)
        await worker.claim(await first.granted())
        await worker.finish(0)
        await worker.claim(await newcomer.granted())
        await worker.vanish()
        for caller in backlog:
            await caller.vanish()
