"""AdminService.Watch through the client of a fabric."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import grpc.aio
import pytest
from support.fabric.in_process import failure_of
from support.ports import free_ports
from support.scheduler.scheduler_harness import SchedulerHarness
from support.time_limits import WITHIN_S

from duplane.fabric import watch_stream
from duplane.fabric.client import FabricClient
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.v1 import admin_pb2
from duplane.fabric.watch_stream import WatchStream
from duplane.scheduler import watch

SERVICE = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name


@contextlib.asynccontextmanager
async def silent_scheduler() -> AsyncGenerator[str]:
    """Run a scheduler that accepts a Watch and never answers."""

    async def watch_silently(request: bytes, _: object) -> None:
        await asyncio.Event().wait()

    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_stream_rpc_method_handler(
        watch_silently
    )
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(SERVICE, {"Watch": handler})]
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def next_event(stream: WatchStream) -> str | None:
    async with asyncio.timeout(WITHIN_S):
        return (await stream.read()).WhichOneof("event")


async def test_watch_begins_with_the_state_and_ends_with_the_scheduler() -> None:
    async with (
        SchedulerHarness.running() as scheduler,
        FabricClient([scheduler.address]) as client,
        client.watch() as stream,
    ):
        assert await next_event(stream) == "snapshot"
        await scheduler.worker("w")
        assert await next_event(stream) == "worker"
        await scheduler.stop()
        assert (await failure_of(stream.read)).reason is Reason.UNAVAILABLE


async def test_watch_passes_schedulers_that_do_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_stream, "FIRST_ANSWER_S", 0.5)
    [nobody] = free_ports(1)
    async with (
        SchedulerHarness.running() as scheduler,
        silent_scheduler() as silent,
        FabricClient([f"127.0.0.1:{nobody}", silent, scheduler.address]) as client,
        client.watch() as stream,
    ):
        assert await next_event(stream) == "snapshot"


async def test_watch_fails_with_the_reason_of_the_last_scheduler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch, "MAX_WATCHER_COUNT", 1)
    async with (
        SchedulerHarness.running() as scheduler,
        FabricClient([scheduler.address]) as client,
        client.watch(),
    ):
        with pytest.raises(FabricError) as refused:
            await client.watch().__aenter__()
        assert refused.value.reason is Reason.TOO_MANY_WATCHES
