"""A scheduler that cannot reach etcd, with real connections: what its peers and probes see."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2
from support.fabric.fault_proxy import FaultProxy
from support.scheduler.etcd_server import EtcdCluster
from support.scheduler.scheduler_harness import SchedulerHarness

from duplane.fabric.channel import health_grpc
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.v1 import admin_pb2, admin_pb2_grpc
from duplane.scheduler.store.etcd import session

pytestmark = pytest.mark.timing

BOUND_S = 15.0


async def health(channel: grpc.aio.Channel) -> Any:
    return (await health_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())).status


async def until_health(channel: grpc.aio.Channel, status: Any) -> None:
    async with asyncio.timeout(BOUND_S):
        watch = health_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        async for response in watch:
            if response.status == status:
                watch.cancel()
                return


async def test_scheduler_that_has_not_read_etcd_does_not_answer_that_there_is_no_worker(
    etcd: EtcdCluster, prefix: str
) -> None:
    async with (
        FaultProxy(etcd.addresses[0]) as proxy,
        SchedulerHarness.running(store=etcd.url(prefix)) as other,
    ):
        await other.worker("w1")
        proxy.hold()
        store = etcd.url(prefix).replace(etcd.addresses[0], proxy.address)
        async with SchedulerHarness.running(store=store) as scheduler:
            stub: Any = admin_pb2_grpc.AdminServiceStub(await scheduler.channel())
            for asked in (
                stub.Watch(admin_pb2.WatchRequest(), timeout=0.3).read(),
                stub.ListWorkers(admin_pb2.ListWorkersRequest(), timeout=0.3),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as unanswered:
                    await asked
                assert unanswered.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            proxy.let_go()
            assert list((await scheduler.operator()).workers) == ["w1"]


async def test_scheduler_without_etcd_is_not_ready_until_it_is_back(
    etcd: EtcdCluster, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "PRESENCE_TTL_S", 3)
    monkeypatch.setattr(session, "ABSENCE_LIMIT_S", 0.5)
    async with FaultProxy(etcd.addresses[0]) as proxy:
        store = etcd.url(prefix).replace(etcd.addresses[0], proxy.address)
        async with (
            SchedulerHarness.running(store=store, queued_interval_s=0.2) as scheduler,
            SchedulerHarness.running(store=etcd.url(prefix), queued_interval_s=0.2) as other,
        ):
            first = await scheduler.caller()
            await first.stands(1)
            channel = await scheduler.channel()
            states = health_pb2.HealthCheckResponse
            assert await health(channel) == states.SERVING
            proxy.hold()
            await until_health(channel, states.NOT_SERVING)
            assert (await first.refused()).reason is Reason.UNAVAILABLE
            with pytest.raises(FabricError) as refused:
                await scheduler.worker()
            assert refused.value.reason is Reason.UNAVAILABLE
            with pytest.raises(grpc.aio.AioRpcError) as listed:
                await admin_pb2_grpc.AdminServiceStub(channel).ListWorkers(
                    admin_pb2.ListWorkersRequest()
                )
            assert listed.value.code() is grpc.StatusCode.UNAVAILABLE
            again = await other.caller(request_id=first.request.request_id, **first.place)
            await again.stands(1)
            assert again.ticket_id == first.ticket_id
            proxy.let_go()
            await until_health(channel, states.SERVING)
            worker = await scheduler.worker()
            await worker.claim(await again.granted())
