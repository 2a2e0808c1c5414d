"""Clients that wait come back at another edge with the token that the first edge gave them."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from support.scheduler.etcd_server import EtcdCluster
from support.scheduler.scheduler_harness import AUDIO, OMNI, Caller, SchedulerHarness
from support.time_limits import WITHIN_S

from duplane.fabric.errors import Reason
from duplane.fabric.v1 import lease_pb2

COUNT = 100  # tickets that wait beside the one that returns
AHEAD = 3  # of them before it


def running(**settings: Any) -> contextlib.AbstractAsyncContextManager[SchedulerHarness]:
    """Run a scheduler whose worker sends no reports of its own."""
    return SchedulerHarness.running(report_interval_s=WITHIN_S, **settings)


async def waiting(harness: SchedulerHarness, position: int, **fields: Any) -> Caller:
    caller = await harness.caller(wants_queue_token=True, **fields)
    await caller.stands(position)
    return caller


def token_of(caller: Caller) -> str:
    return caller.queued[-1].queue_token


async def vanished(harness: SchedulerHarness, caller: Caller, left: int) -> None:
    """End a call as a killed edge does, and wait until its ticket is gone."""
    operator = await harness.operator()
    await caller.vanish()
    await operator.until(lambda seen: len(seen.tickets) == left)


@pytest.mark.slow
async def test_client_of_a_killed_edge_keeps_its_position_beside_100_others() -> None:
    async with running() as harness:
        worker = await harness.worker()
        await worker.claim(await (await harness.caller()).granted())
        ahead = [await waiting(harness, 1 + index) for index in range(AHEAD)]
        lost = await waiting(harness, AHEAD + 1, caller_key=b"first edge")
        channel = await harness.channel()
        behind = [
            Caller(channel, lease_pb2.AcquireLeaseRequest(request_id=f"behind-{index}", kind=AUDIO))
            for index in range(COUNT - AHEAD)
        ]
        await asyncio.gather(*(caller.read() for caller in behind))
        await vanished(harness, lost, COUNT)
        back = await harness.caller(caller_key=b"second edge", queue_token=token_of(lost))
        await back.read()
        assert (back.position, back.ticket_id) == (lost.position, lost.ticket_id)
        for caller in (*ahead, back):
            await worker.finish(0)
            await worker.claim(await caller.granted())


@pytest.mark.usefixtures("every_store")
async def test_edge_that_still_waits_for_the_client_loses_the_ticket() -> None:
    """The first edge is cut off from the client, and has not noticed it."""
    async with running() as harness:
        worker = await harness.worker()
        await worker.claim(await (await harness.caller()).granted())
        first = await waiting(harness, 1, caller_key=b"first edge")
        back = await waiting(harness, 1, caller_key=b"second edge", queue_token=token_of(first))
        assert (await first.refused()).reason is Reason.SUPERSEDED
        await worker.finish(0)
        await worker.claim(await back.granted())


async def test_token_is_valid_at_every_scheduler_of_the_store(
    etcd: EtcdCluster, prefix: str
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        first, second = [
            await stack.enter_async_context(running(store=etcd.url(prefix))) for _ in range(2)
        ]
        worker = await first.worker()
        await worker.claim(await (await first.caller()).granted())
        lost = await waiting(first, 1)
        other = await waiting(first, 2)
        await vanished(first, lost, 1)
        await other.stands(1)
        back = await waiting(second, 1, queue_token=token_of(lost))
        assert back.ticket_id == lost.ticket_id


@pytest.mark.usefixtures("every_store")
async def test_void_tokens_stand_last() -> None:
    async with running() as harness:
        worker = await harness.worker()
        await worker.claim(await (await harness.caller()).granted())
        used = await waiting(harness, 1)
        other = await waiting(harness, 2)
        await worker.finish(0)
        claims = await worker.claim(await used.granted())
        operator = await harness.operator()
        await operator.until(lambda seen: seen.leases[claims.lease_id].is_claimed)
        await other.stands(1)
        await waiting(harness, 2, queue_token=token_of(used))
        await waiting(harness, 3, queue_token="made up")


@pytest.mark.usefixtures("every_store")
async def test_token_of_another_queue_and_a_long_one_are_refused_by_name() -> None:
    async with running() as harness:
        worker = await harness.worker()
        await worker.claim(await (await harness.caller()).granted())
        first = await waiting(harness, 1)
        wrong: list[dict[str, Any]] = [
            {"kind": OMNI, "queue_token": token_of(first)},
            {"queue_token": "t" * 513},
        ]
        for fields in wrong:
            refused = await (await harness.caller(**fields)).refused()
            assert (refused.reason, refused.field) == (Reason.INVALID_FIELD, "queue_token")


@pytest.mark.usefixtures("every_store")
async def test_callers_that_ask_for_no_token_get_none() -> None:
    async with running() as harness:
        worker = await harness.worker()
        await worker.claim(await (await harness.caller()).granted())
        caller = await harness.caller()
        await caller.stands(1)
        assert token_of(caller) == ""
