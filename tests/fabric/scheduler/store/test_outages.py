"""The queues of a store stay bounded while etcd refuses calls or does not answer."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Sequence

import grpc
import pytest
from support.scheduler.etcd_server import EtcdCluster
from support.scheduler.racing_stores import Scheduler
from support.scheduler.scheduler_harness import AUDIO, register_message
from support.time_limits import WITHIN_S

from duplane.fabric.errors import FabricError
from duplane.fabric.v1 import lease_pb2
from duplane.scheduler.store.base import Change, DrainRequest, Offer, Ticket, WorkerGone
from duplane.scheduler.store.etcd import store as etcd_store
from duplane.scheduler.store.etcd.store import EtcdStore

DRAIN, STOP, UNDRAIN = DrainRequest.DRAIN, DrainRequest.STOP, DrainRequest.UNDRAIN
_names = itertools.count()


@pytest.fixture
async def one(etcd: EtcdCluster, prefix: str) -> AsyncGenerator[Scheduler]:
    scheduler = Scheduler(etcd.url(prefix))
    running = asyncio.create_task(scheduler.store.run())
    await scheduler.store.cancel(0)  # returns as soon as the scheduler has a session
    yield scheduler
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


async def arrive(store: EtcdStore, request_id: str = "") -> Ticket:
    request_id = request_id or f"request-{next(_names)}"
    request = lease_pb2.AcquireLeaseRequest(request_id=request_id, kind=AUDIO)
    ticket = await store.enqueue(request, f"owner of {request_id}")
    assert isinstance(ticket, Ticket)
    return ticket


@pytest.mark.parametrize(
    "code", [grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.INVALID_ARGUMENT]
)
async def test_request_that_etcd_refuses_is_made_again(
    one: Scheduler, code: grpc.StatusCode
) -> None:
    store = one.store
    one.etcd.refuse(code)
    arriving = asyncio.create_task(arrive(store))
    cancelling = asyncio.create_task(store.catch_up())
    await one.etcd.asked()
    await one.etcd.asked()
    assert not arriving.done()
    assert not cancelling.done()
    one.etcd.recover()
    async with asyncio.timeout(WITHIN_S):
        ticket = await arriving
        await cancelling
    assert await store.cancel(ticket.order)


async def test_arrivals_are_refused_at_once_while_many_operations_wait(
    one: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = one.store
    limit = 5
    monkeypatch.setattr(etcd_store, "MAX_WAITING", limit)
    monkeypatch.setattr(etcd_store, "ARRIVAL_TIMEOUT_S", 0.05)
    one.etcd.hang()
    for _ in range(limit):
        with pytest.raises(FabricError, match="the store does not answer"):
            await arrive(store)
    with pytest.raises(FabricError, match="too many operations"):
        await arrive(store)
    with pytest.raises(FabricError, match="too many operations"):
        await store.register(register_message())
    assert store.waiting_count == limit
    one.etcd.recover()
    await one.until_none_waits()
    monkeypatch.setattr(etcd_store, "ARRIVAL_TIMEOUT_S", WITHIN_S)
    ticket = await arrive(store)
    assert list(store.facts.tickets.values()) == [ticket], "an arrival was not undone"
    await store.cancel(ticket.order)


async def test_operation_that_is_asked_for_again_waits_once(one: Scheduler) -> None:
    store = one.store
    worker = await store.register(register_message())
    ticket = await arrive(store)
    assert worker
    claims = lease_pb2.LeaseClaims(
        lease_id="lease", worker_id="w", worker_epoch=worker.epoch, slot=0, kind=AUDIO
    )
    grant = await store.try_grant(ticket, Offer(claims, 60))
    assert grant
    behind = await arrive(store)
    one.etcd.hang()
    asked = [
        asyncio.create_task(operation)
        for _ in range(3)
        for operation in (
            store.give_back(grant),
            store.cancel(behind.order),
            store.drain("w"),
            store.set_unreachable("w", worker.epoch, is_unreachable=True),
        )
    ]
    await one.etcd.asked()
    assert store.waiting_count == 4
    one.etcd.recover()
    async with asyncio.timeout(WITHIN_S):
        assert all(await asyncio.gather(*asked))
    assert not store.facts.granted
    assert not store.facts.tickets
    assert store.facts.workers["w"].is_drain_requested
    assert store.facts.workers["w"].is_unreachable
    await store.unregister("w", worker.epoch)


@pytest.mark.parametrize(
    ("asked", "last"),
    [
        ((DRAIN, STOP), STOP),
        ((STOP, UNDRAIN), STOP),
        ((DRAIN, UNDRAIN), UNDRAIN),
        ((DRAIN, UNDRAIN, DRAIN), DRAIN),
    ],
)
@pytest.mark.parametrize("is_sent", [False, True])
async def test_last_of_the_drain_requests_that_wait_is_written(
    one: Scheduler, asked: Sequence[DrainRequest], last: DrainRequest, *, is_sent: bool
) -> None:
    """If `is_sent`, the transaction of the first request is on its way to etcd."""
    store = one.store
    worker = await store.register(register_message())
    assert worker
    first, *later = asked
    one.etcd.hang()
    waiting = [asyncio.create_task(store.drain("w", first))]
    if is_sent:
        await one.etcd.asked()
    waiting += [asyncio.create_task(store.drain("w", request)) for request in later]
    if not is_sent:
        await one.etcd.asked()
    await asyncio.sleep(0)  # the tasks ask
    assert store.waiting_count == 1
    one.etcd.recover()
    async with asyncio.timeout(WITHIN_S):
        assert all(await asyncio.gather(*waiting))
    assert store.facts.workers["w"].drain_request is last
    await store.unregister("w", worker.epoch)


async def test_registration_ends_though_its_stream_is_cancelled_again(one: Scheduler) -> None:
    store = one.store
    worker = await store.register(register_message())
    assert worker
    is_gone = asyncio.Event()
    store.subscribe(lambda change: is_gone.set() if isinstance(change, WorkerGone) else None)
    one.etcd.hang()
    ending = asyncio.create_task(store.unregister(worker.worker_id, worker.epoch))
    await asyncio.sleep(0)
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    one.etcd.recover()
    async with asyncio.timeout(WITHIN_S):
        await is_gone.wait()


async def test_registration_whose_worker_has_gone_is_not_made_after_the_outage(
    one: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = one.store
    changes: list[Change] = []
    store.subscribe(changes.append)
    monkeypatch.setattr(etcd_store, "ARRIVAL_TIMEOUT_S", 0.05)
    one.etcd.refuse(grpc.StatusCode.PERMISSION_DENIED)
    for _ in range(3):
        with pytest.raises(FabricError, match="the store does not answer"):
            await store.register(register_message())
    one.etcd.recover()
    await one.until_none_waits()
    assert not changes
