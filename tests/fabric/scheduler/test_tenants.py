"""Tenants at real schedulers: all edges share a tenant's limits, and tenants take turns."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from support.monitoring.metrics import read
from support.scheduler.etcd_server import EtcdCluster
from support.scheduler.scheduler_harness import Caller, SchedulerHarness
from support.time_limits import WITHIN_S

from duplane.fabric.client import FabricClient
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.v1 import lease_pb2
from duplane.scheduler import quotas
from duplane.scheduler.etcd.client import EtcdClient
from duplane.scheduler.store.etcd import records_pb2

AUDIO = lease_pb2.SESSION_KIND_AUDIO_DUPLEX


def of_tenant(tenant_id: str = "a", **limits: int) -> dict[str, Any]:
    return {"tenant_id": tenant_id, "tenant_limits": lease_pb2.TenantLimits(**limits)}


def refused_by(error: FabricError) -> tuple[Reason, str]:
    return error.reason, error.field


SESSIONS = (Reason.TENANT_QUOTA, "tenant_limits.session_count")
WAITING = (Reason.TENANT_QUOTA, "tenant_limits.waiting_count")


async def test_two_edges_share_one_quota() -> None:
    async with contextlib.AsyncExitStack() as stack:
        harness = await stack.enter_async_context(SchedulerHarness.running())
        worker = await harness.worker(slot_count=4)
        edges = [await stack.enter_async_context(FabricClient([harness.address])) for _ in range(2)]

        def request(number: int, tenant_id: str = "a") -> lease_pb2.AcquireLeaseRequest:
            return lease_pb2.AcquireLeaseRequest(
                request_id=f"r{number}", kind=AUDIO, **of_tenant(tenant_id, session_count=2)
            )

        held = [await edge.acquire(request(number)) for number, edge in enumerate(edges)]
        for granted in held:
            assert (await worker.claim(granted)).tenant_id == "a"
        for number, edge in enumerate(edges, 2):
            with pytest.raises(FabricError) as refused:
                await edge.acquire(request(number))
            assert refused_by(refused.value) == SESSIONS
        await worker.claim(await edges[0].acquire(request(4, "b")))
        await worker.finish(0)
        operator = await harness.operator()
        await operator.until(lambda seen: len(seen.leases) == 2)
        await edges[1].acquire(request(5))


@pytest.mark.usefixtures("every_store")
async def test_burst_of_requests_leaves_exactly_as_many_as_allowed() -> None:
    async with SchedulerHarness.running() as harness:
        callers = [await harness.caller(**of_tenant(waiting_count=3)) for _ in range(12)]
        outcomes = await asyncio.gather(*(outcome(caller) for caller in callers))
        assert outcomes.count(None) == 3
        assert outcomes.count(WAITING) == 9


async def test_two_schedulers_share_one_quota(etcd: EtcdCluster, prefix: str) -> None:
    async with (
        SchedulerHarness.running(store=etcd.url(prefix)) as first,
        SchedulerHarness.running(store=etcd.url(prefix)) as second,
    ):
        callers = [
            await harness.caller(**of_tenant(session_count=3))
            for _ in range(6)
            for harness in (first, second)
        ]
        outcomes = await asyncio.gather(*(outcome(caller) for caller in callers))
        assert outcomes.count(None) == 3
        assert outcomes.count(SESSIONS) == 9


async def test_minutes_outlast_the_schedulers_of_a_shared_store(
    etcd: EtcdCluster, client: EtcdClient, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quotas, "SAVE_INTERVAL_S", 0.01)
    monkeypatch.setattr(quotas, "SAVED_STEP_S", 0.0)
    key = f"{prefix}time/a".encode()
    async with SchedulerHarness.running(store=etcd.url(prefix)) as first:
        worker = await first.worker()
        await worker.claim(await (await first.caller(**of_tenant())).granted())
        await worker.finish(0)
        async with asyncio.timeout(WITHIN_S):
            while True:
                saved = (await client.read(key)).kvs
                if saved:
                    break
                await asyncio.sleep(0.01)
    record = records_pb2.TimeRecord.FromString(saved[0].value)
    assert 0 < record.held_s < WITHIN_S
    record.held_s = 120
    await client.put(key, record.SerializeToString())
    async with SchedulerHarness.running(store=etcd.url(prefix)) as second:
        await (await second.caller(**of_tenant(daily_minutes=3))).stands(1)
        refused = await (await second.caller(**of_tenant(daily_minutes=2))).refused()
        assert refused_by(refused) == (Reason.TENANT_QUOTA, "tenant_limits.daily_minutes")


async def outcome(caller: Caller) -> tuple[Reason, str] | None:
    """Return why a call was refused; None if it waits."""
    try:
        await caller.read()
    except FabricError as error:
        return refused_by(error)
    return None


async def test_tenant_has_its_share_of_the_queue_and_others_have_the_rest() -> None:
    async with SchedulerHarness.running(ticket_limit=20) as harness:
        for position in (1, 2):
            await (await harness.caller(**of_tenant())).stands(position)
        refused = await (await harness.caller(**of_tenant())).refused()
        assert refused_by(refused) == WAITING
        await (await harness.caller(**of_tenant("b"))).stands(2)
        await (await harness.caller()).stands(3)
        shown = read(harness.metrics)
        assert shown.value("duplane_queue_highest_tenant_share") == 0.1
        assert shown.value("duplane_tenants", state="waiting") == 2
        assert shown.value("duplane_tenant_refusals_total", limit="waiting_count") == 1
        name = "duplane_lease_requests_refused_total"
        assert shown.value(name, reason="TENANT_QUOTA") == 1


async def test_sessions_of_a_tenant_count_after_a_restart_that_has_lost_the_grants() -> None:
    async with SchedulerHarness.running() as harness:
        worker = await harness.worker(slot_count=2)
        await worker.claim(await (await harness.caller(**of_tenant())).granted())
        worker.slots[0].tenant_id = "a"
        await harness.stop()
        await worker.ended()
        await harness.start()
        await worker.attach_again()
        operator = await harness.operator()
        await operator.until(lambda seen: len(seen.leases) == 1)
        refused = await (await harness.caller(**of_tenant(session_count=1))).refused()
        assert refused_by(refused) == SESSIONS


async def test_invalid_limit_and_other_tenant_name_the_field() -> None:
    async with SchedulerHarness.running() as harness:
        refused = await (await harness.caller(**of_tenant(daily_minutes=-1))).refused()
        assert refused_by(refused) == (Reason.INVALID_FIELD, "tenant_limits.daily_minutes")
        refused = await (await harness.caller(tenant_id="a" * 257)).refused()
        assert refused_by(refused) == (Reason.INVALID_FIELD, "tenant_id")
        waiting = await harness.caller(**of_tenant())
        await waiting.stands(1)
        refused = await (await harness.caller(tenant_id="b", ticket_id=waiting.ticket_id)).refused()
        assert refused_by(refused) == (Reason.INVALID_FIELD, "tenant_id")


@pytest.mark.usefixtures("every_store")
async def test_tenants_take_turns_and_a_lost_session_comes_first() -> None:
    async with SchedulerHarness.running() as harness:
        worker = await harness.worker()
        running = await (await harness.caller(tenant_id="busy")).granted()
        await worker.claim(running)
        backlog: list[Caller] = []
        for position in range(1, 5):
            backlog.append(await harness.caller(tenant_id="busy"))
            await backlog[-1].stands(position)
        other = await harness.caller(tenant_id="other")
        await other.stands(2)
        await worker.finish(0)
        await worker.claim(await backlog[0].granted())
        await worker.finish(0)
        granted = await other.granted()
        await harness.release(granted.lease_id)  # its slot could not be claimed
        await worker.claim(await backlog[1].granted())
        back = await harness.caller(
            tenant_id="other",
            ticket_id=granted.ticket_id,
            ticket_proof=granted.ticket_proof,
            was_granted=True,
        )
        await back.stands(1)
        await worker.finish(0)
        await back.granted()
