"""The queues of a store stay bounded while etcd refuses calls or does not answer."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator

import grpc
import pytest
from support.scheduler.etcd_server import EtcdCluster
from support.scheduler.scheduler_harness import AUDIO, register_message
from support.time_limits import WITHIN_S

from duplane.fabric.errors import FabricError
from duplane.fabric.v1 import lease_pb2
from duplane.scheduler.etcd.access import Credentials, EtcdUrl
from duplane.scheduler.etcd.client import EtcdError
from duplane.scheduler.etcd.v3 import etcd_pb2
from duplane.scheduler.store.base import Change, Offer, Ticket
from duplane.scheduler.store.etcd import store as etcd_store
from duplane.scheduler.store.etcd.store import EtcdStore

_names = itertools.count()


class Etcd:
    """The client of a store, with an outage that a test begins and ends."""

    def __init__(self, store: EtcdStore) -> None:
        self.store = store
        self._answers = asyncio.Event()
        self._answers.set()
        self._has_asked = asyncio.Event()
        self._refusal: EtcdError | None = None
        self._put, self._txn = store._client.put, store._client.txn
        store._client.put, store._client.txn = self.put, self.txn

    def hang(self) -> None:
        self._answers.clear()

    def refuse(self, code: grpc.StatusCode) -> None:
        self._refusal = EtcdError(code, "permission denied")

    def recover(self) -> None:
        self._refusal = None
        self._answers.set()

    async def put(self, key: bytes, value: bytes, lease: int = 0) -> int:
        await self._pass()
        return await self._put(key, value, lease)

    async def txn(self, request: etcd_pb2.TxnRequest) -> etcd_pb2.TxnResponse:
        await self._pass()
        return await self._txn(request)

    async def asked(self) -> None:
        """Wait until the store sends the next request."""
        self._has_asked.clear()
        async with asyncio.timeout(WITHIN_S):
            await self._has_asked.wait()

    async def _pass(self) -> None:
        self._has_asked.set()
        if self._refusal:
            raise self._refusal
        await self._answers.wait()


@pytest.fixture
async def etcd_client(etcd: EtcdCluster, prefix: str) -> AsyncGenerator[Etcd]:
    store = EtcdStore(EtcdUrl.parse(etcd.url(prefix)), Credentials(), 1_700_000_000_000)
    running = asyncio.create_task(store.run())
    await store.cancel(0)  # returns as soon as the scheduler has a session
    yield Etcd(store)
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
    etcd_client: Etcd, code: grpc.StatusCode
) -> None:
    store = etcd_client.store
    etcd_client.refuse(code)
    arriving = asyncio.create_task(arrive(store))
    cancelling = asyncio.create_task(store.catch_up())
    await etcd_client.asked()
    await etcd_client.asked()
    assert not arriving.done()
    assert not cancelling.done()
    etcd_client.recover()
    async with asyncio.timeout(WITHIN_S):
        ticket = await arriving
        await cancelling
    assert await store.cancel(ticket.order)


async def test_arrivals_are_refused_at_once_while_many_operations_wait(
    etcd_client: Etcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = etcd_client.store
    limit = 5
    monkeypatch.setattr(etcd_store, "MAX_WAITING", limit)
    monkeypatch.setattr(etcd_store, "ARRIVAL_TIMEOUT_S", 0.05)
    etcd_client.hang()
    for _ in range(limit):
        with pytest.raises(FabricError, match="the store does not answer"):
            await arrive(store)
    with pytest.raises(FabricError, match="too many operations"):
        await arrive(store)
    with pytest.raises(FabricError, match="too many operations"):
        await store.register(register_message())
    assert store._commits.count == limit
    etcd_client.recover()
    async with asyncio.timeout(WITHIN_S):
        while store._arriving:  # an operation that ends may start its undo
            await asyncio.wait(store._arriving)
    monkeypatch.setattr(etcd_store, "ARRIVAL_TIMEOUT_S", WITHIN_S)
    ticket = await arrive(store)
    assert list(store._facts.tickets.values()) == [ticket], "an arrival was not undone"
    await store.cancel(ticket.order)


async def test_operation_that_is_asked_for_again_waits_once(etcd_client: Etcd) -> None:
    store = etcd_client.store
    worker = await store.register(register_message())
    ticket = await arrive(store)
    assert worker
    claims = lease_pb2.LeaseClaims(
        lease_id="lease", worker_id="w", worker_epoch=worker.epoch, slot=0, kind=AUDIO
    )
    grant = await store.try_grant(ticket, Offer(claims, 60))
    assert grant
    behind = await arrive(store)
    etcd_client.hang()
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
    await etcd_client.asked()
    assert store._commits.count == 4
    etcd_client.recover()
    async with asyncio.timeout(WITHIN_S):
        assert all(await asyncio.gather(*asked))
    assert not store._facts.granted
    assert not store._facts.tickets
    assert store._facts.workers["w"].is_drain_requested
    assert store._facts.workers["w"].is_unreachable
    await store.unregister("w", worker.epoch)


async def test_registration_ends_though_its_stream_is_cancelled_again(etcd_client: Etcd) -> None:
    store = etcd_client.store
    worker = await store.register(register_message())
    assert worker
    etcd_client.hang()
    ending = asyncio.create_task(store.unregister(worker.worker_id, worker.epoch))
    await asyncio.sleep(0)
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    etcd_client.recover()
    async with asyncio.timeout(WITHIN_S):
        await store._mirror.until(lambda: not store._facts.workers)


async def test_registration_whose_worker_has_gone_is_not_made_after_the_outage(
    etcd_client: Etcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = etcd_client.store
    changes: list[Change] = []
    store.subscribe(changes.append)
    monkeypatch.setattr(etcd_store, "ARRIVAL_TIMEOUT_S", 0.05)
    etcd_client.refuse(grpc.StatusCode.PERMISSION_DENIED)
    for _ in range(3):
        with pytest.raises(FabricError, match="the store does not answer"):
            await store.register(register_message())
    etcd_client.recover()
    async with asyncio.timeout(WITHIN_S):
        while store._arriving:
            await asyncio.wait(store._arriving)
    assert not changes
