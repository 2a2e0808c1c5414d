"""Two schedulers on one etcd. A test can act before the next transaction of one of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from support.scheduler.scheduler_harness import AUDIO, register_message

from duplane.fabric.v1 import lease_pb2
from duplane.scheduler.etcd.access import Credentials, EtcdUrl
from duplane.scheduler.etcd.client import NoAnswerError
from duplane.scheduler.etcd.v3 import etcd_pb2
from duplane.scheduler.store.base import Grant, Offer, Ticket, Worker
from duplane.scheduler.store.etcd.store import EtcdStore

BOOT_MS = 1_700_000_000_000
LONG_S = 60.0


class Scheduler:
    """A running store. A test can act before the store's next transaction, or drop its answer."""

    def __init__(self, url: str) -> None:
        self.store = EtcdStore(EtcdUrl.parse(url), Credentials(), BOOT_MS)
        self.facts = self.store._facts
        self.sent_count = 0
        self.before_next: Callable[[], Awaitable[object]] | None = None
        self.lost = ""
        self.late: etcd_pb2.TxnRequest | None = None
        self._txn = self.store._client.txn
        self.store._client.txn = self.txn

    async def txn(self, request: etcd_pb2.TxnRequest) -> etcd_pb2.TxnResponse:
        if before := self.before_next:
            self.before_next = None
            await before()
        lost, self.lost = self.lost, ""
        if lost == "executed later":
            self.late = request
            raise NoAnswerError(lost)
        self.sent_count += 1
        response = await self._txn(request)
        if lost:
            raise NoAnswerError(lost)
        return response

    async def execute_late(self) -> bool:
        assert self.late
        return (await self._txn(self.late)).succeeded

    async def enqueue(self, name: str, order: int | None = None, owner: str = "") -> Ticket | Grant:
        request = lease_pb2.AcquireLeaseRequest(request_id=name, kind=AUDIO)
        return await self.store.enqueue(request, owner or f"{name} at {id(self)}", order)

    async def ticket(self, name: str, order: int | None = None) -> Ticket:
        ticket = await self.enqueue(name, order)
        assert isinstance(ticket, Ticket)
        return ticket

    async def grant(self, ticket: Ticket, worker: Worker, slot: int = 0) -> Grant | None:
        offer = self.offer(ticket.ticket_id, worker, slot)
        return await self.store.try_grant(ticket, offer)

    async def at_once(self, name: str, worker: Worker) -> Ticket | Grant:
        """Enqueue a request, and offer a slot for it."""
        request = lease_pb2.AcquireLeaseRequest(request_id=name, kind=AUDIO)
        offer = self.offer(name, worker)
        return await self.store.enqueue(request, f"{name} at {id(self)}", None, offer)

    def offer(self, name: str, worker: Worker, slot: int = 0) -> Offer:
        claims = lease_pb2.LeaseClaims(
            lease_id=f"{name} {id(self)} {slot}",
            worker_id=worker.worker_id,
            worker_epoch=worker.epoch,
            slot=slot,
            kind=AUDIO,
        )
        return Offer(claims, LONG_S)

    async def worker(self, slot_count: int = 1) -> Worker:
        worker = await self.store.register(register_message("w", slot_count))
        assert worker
        return worker


Pair = tuple[Scheduler, Scheduler]


async def settled(pair: Pair) -> None:
    for scheduler in pair:
        await scheduler.store.catch_up()
    one, other = pair
    assert one.facts.tickets == other.facts.tickets
    assert one.facts.granted == other.facts.granted
