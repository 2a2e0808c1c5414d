"""Two schedulers on one etcd. A test can act before the next transaction of one of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from support.scheduler.faulty_client import FaultyClient
from support.scheduler.scheduler_harness import AUDIO, register_message
from support.time_limits import WITHIN_S

from duplane.fabric.v1 import lease_pb2
from duplane.scheduler.etcd.url import EtcdUrl
from duplane.scheduler.store.base import Grant, Offer, Ticket, Worker
from duplane.scheduler.store.etcd.store import EtcdStore

BOOT_MS = 1_700_000_000_000
LONG_S = 60.0


class Scheduler:
    """A running store, and its client of etcd."""

    def __init__(self, url: str) -> None:
        place = EtcdUrl.parse(url)
        self.etcd = FaultyClient(place)
        self.store = EtcdStore(self.etcd, place.prefix, BOOT_MS)
        self.facts = self.store.facts

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

    async def until(self, is_true: Callable[[], bool]) -> None:
        """Wait until `is_true()` after a change, even if only until the next change."""
        reached = asyncio.Event()
        self.store.subscribe(lambda _: reached.set() if is_true() else None)
        async with asyncio.timeout(WITHIN_S):
            if not is_true():
                await reached.wait()

    async def until_none_waits(self) -> None:
        """Wait until no operation waits for etcd; one that ends may start its undo."""
        async with asyncio.timeout(WITHIN_S):
            while self.store.waiting_count:
                await self.store.catch_up()


Pair = tuple[Scheduler, Scheduler]


async def settled(pair: Pair) -> None:
    for scheduler in pair:
        await scheduler.store.catch_up()
    one, other = pair
    assert one.facts.tickets == other.facts.tickets
    assert one.facts.granted == other.facts.granted
