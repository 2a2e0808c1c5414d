"""A scheduler that dies during a transaction with etcd, for each kind of transaction.

Either etcd does not receive the last request, or etcd executes it and the answer is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator

import pytest
from support.scheduler.etcd_proxy import EtcdProxy
from support.scheduler.etcd_server import EtcdCluster
from support.scheduler.scheduler_harness import AUDIO, SchedulerHarness
from support.scheduler.watching_operator import Operator

from duplane.fabric.client import FabricClient
from duplane.fabric.errors import FabricError
from duplane.fabric.v1 import lease_pb2, registry_pb2
from duplane.scheduler.etcd.v3 import etcd_pb2
from duplane.scheduler.store.etcd.keys import Keys
from duplane.scheduler.store.etcd.records import Slot, read_request, read_slot
from duplane.worker import attach
from duplane.worker.admission import Admission, slot_reports
from duplane.worker.attach import AttachedWorker, AttachLoop

BOUND_S = 40.0
SESSIONS = 4
IS_CHANGE: dict[str, Callable[[Slot], bool]] = {
    "grant": lambda slot: slot.end is None and not slot.grant.is_claimed,
    "claim": lambda slot: slot.end is None and slot.grant.is_claimed,
    "release": lambda slot: slot.end is not None,
}


class Transactions:
    """Recognises the transactions of one kind, and chooses one of them by its number."""

    def __init__(self, prefix: str, kind: str, number: int) -> None:
        self._keys = Keys(prefix)
        self._kind = kind
        self._left = number

    def choose(self, request: etcd_pb2.TxnRequest) -> bool:
        if any(self._is_of_kind(put) for put in _puts(request)):
            self._left -= 1
            return self._left == 0
        return False

    def _is_of_kind(self, put: etcd_pb2.PutRequest) -> bool:
        if not put.key:
            return False
        kind, *_ = self._keys.parse(put.key)
        if self._kind == "enqueue":
            return kind == "request" and not read_request(put.value, 0, 0).is_granted
        return kind == "slot" and IS_CHANGE[self._kind](read_slot(put.value, 0))


def _puts(request: etcd_pb2.TxnRequest) -> Iterator[etcd_pb2.PutRequest]:
    """Yield the puts of a transaction and of the transactions nested in it."""
    for one in request.success:
        yield one.request_put
        yield from _puts(one.request_txn)


class OneSlot:
    """A worker with one slot and the attach loop of the real worker."""

    def __init__(self, schedulers: list[str]) -> None:
        self.numbers: list[int] = []
        self._admission = Admission("w", 1, [AUDIO])
        worker = AttachedWorker(
            *(self._admission, self._register, self._report),
            end_session=lambda *_: None,
            drain=lambda: None,
            undrain=lambda: None,
            stop=lambda: None,
        )
        loop = AttachLoop(schedulers, worker)
        self._admission.on_change = loop.report_soon
        self.run = loop.run

    def _register(self) -> registry_pb2.Register:
        return registry_pb2.Register(
            worker_id="w",
            incarnation="1",
            address="127.0.0.1:1",
            kinds=[AUDIO],
            slots=slot_reports(self._admission),
        )

    def _report(self) -> registry_pb2.Report:
        return registry_pb2.Report(slots=slot_reports(self._admission))

    async def serve(self, lease: lease_pb2.Lease, last: Callable[[], Awaitable[None]]) -> None:
        """Claim the lease, hold the slot until `last` returns, then free the slot."""
        claims = self._admission.claim(lease, time.monotonic())
        self.numbers.append(claims.fencing_number)
        await last()
        self._admission.begin_cleanup(0)
        self._admission.finish_cleanup(0, is_clean=True)


class Sessions:
    """Sessions that arrive one after the other and need the worker's only slot.

    A session ends after the operator has seen that its lease is claimed.
    """

    def __init__(self, client: FabricClient, worker: OneSlot, operator: Operator) -> None:
        self.served: list[int] = []
        self._client = client
        self._worker = worker
        self._operator = operator
        self._have_arrived = asyncio.Event()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(SESSIONS):
                has_arrived = asyncio.Event()
                tasks.create_task(self._run_one(number, has_arrived))
                await has_arrived.wait()
            self._have_arrived.set()

    async def _run_one(self, number: int, has_arrived: asyncio.Event) -> None:
        request = lease_pb2.AcquireLeaseRequest(kind=AUDIO)

        async def on_queued(queued: lease_pb2.Queued) -> None:
            request.ticket_id, request.ticket_proof = queued.ticket_id, queued.ticket_proof
            has_arrived.set()

        for attempt in range(5):
            request.request_id = f"session {number}, attempt {attempt}"
            granted = await self._client.acquire(request, on_queued)
            has_arrived.set()
            request.ticket_id, request.ticket_proof = granted.ticket_id, granted.ticket_proof
            with contextlib.suppress(FabricError):
                await self._worker.serve(granted.lease, functools.partial(self._last, granted))
                self.served.append(number)
                return
            await self._client.release(granted.lease_id)
        raise AssertionError(f"session {number} was granted five void leases")

    async def _last(self, granted: lease_pb2.Granted) -> None:
        def is_claimed(seen: Operator) -> bool:
            lease = seen.leases.get(granted.lease_id)
            return lease is not None and lease.is_claimed

        await self._have_arrived.wait()
        await self._operator.until(is_claimed)


@pytest.fixture
async def proxy(etcd: EtcdCluster) -> AsyncGenerator[EtcdProxy]:
    async with EtcdProxy(etcd.addresses[0]) as opened:
        yield opened


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("is_executed", [False, True], ids=["request lost", "answer lost"])
@pytest.mark.parametrize("kind", ["enqueue", "grant", "claim", "release"])
async def test_sessions_are_served_once_and_in_order(
    etcd: EtcdCluster,
    proxy: EtcdProxy,
    prefix: str,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    is_executed: bool,
    number: int,
) -> None:
    monkeypatch.setattr(attach.random, "getrandbits", lambda _: 0)  # the first scheduler is used
    async with (
        SchedulerHarness.running(store=f"etcd://{proxy.address}?prefix={prefix}") as doomed,
        SchedulerHarness.running(store=etcd.url(prefix)) as other,
        FabricClient([doomed.address, other.address]) as client,
        asyncio.timeout(BOUND_S),
    ):
        worker = OneSlot([doomed.address, other.address])
        attached = asyncio.create_task(worker.run())
        try:
            operator = await other.operator()
            await operator.until(lambda seen: "w" in seen.workers)
            proxy.lose(Transactions(prefix, kind, number).choose, is_executed=is_executed)
            sessions = Sessions(client, worker, operator)
            running = asyncio.create_task(sessions.run())
            await proxy.has_lost.wait()
            await doomed.kill()
            await running
            # After a release, the slot may be free before every caller has connected again. Then it
            # goes to the first of those that have.
            is_ordered = kind != "release"
            served = sessions.served if is_ordered else sorted(sessions.served)
            assert served == list(range(SESSIONS))
            assert worker.numbers == sorted(set(worker.numbers))
            assert len(worker.numbers) == SESSIONS
            await operator.until(lambda seen: not seen.leases and not seen.tickets)
        finally:
            attached.cancel()
