"""AdminService.Watch through the client of a fabric."""

from __future__ import annotations

import asyncio

import pytest
from support.fabric.in_process import failure_of
from support.ports import free_ports
from support.scheduler.scheduler_harness import SchedulerHarness
from support.scheduler.scripted_watch import serve_watch
from support.time_limits import WITHIN_S

from duplane.fabric import watch_stream
from duplane.fabric.client import FabricClient
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.watch_stream import WatchStream
from duplane.scheduler import watch


async def watch_silently(request: bytes, _: object) -> None:
    """Accept a Watch and never answer."""
    await asyncio.Event().wait()


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
        serve_watch(watch_silently) as silent,
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
