"""Operations on any lease store, and the changes that they cause."""

from __future__ import annotations

import asyncio
import itertools
from typing import TypeVar

from support.scheduler.scheduler_harness import AUDIO, register_message
from support.time_limits import WITHIN_S

from duplane.fabric.v1 import lease_pb2
from duplane.scheduler.store.base import Change, Grant, LeaseStore, Offer, Ticket, Worker

LONG_S = 60.0
OneChange = TypeVar("OneChange", bound=Change)
_numbers = itertools.count()


class Changes:
    """All changes that a subscriber has received."""

    def __init__(self, store: LeaseStore) -> None:
        self.received: list[Change] = []
        self._has_more = asyncio.Event()
        store.subscribe(self._append)

    def _append(self, change: Change) -> None:
        self.received.append(change)
        self._has_more.set()

    def of(self, kind: type[OneChange]) -> list[OneChange]:
        return [change for change in self.received if isinstance(change, kind)]

    async def one(self, kind: type[OneChange], count: int = 1) -> OneChange:
        """Wait for the `count`-th change of a kind."""
        async with asyncio.timeout(WITHIN_S):
            while len(found := self.of(kind)) < count:
                self._has_more.clear()
                await self._has_more.wait()
        return found[count - 1]


def lease_request(request_id: str = "") -> lease_pb2.AcquireLeaseRequest:
    request_id = request_id or f"request-{next(_numbers)}"
    return lease_pb2.AcquireLeaseRequest(request_id=request_id, kind=AUDIO)


async def registered(store: LeaseStore, worker_id: str = "w", slot_count: int = 1) -> Worker:
    worker = await store.register(register_message(worker_id, slot_count))
    assert worker
    return worker


async def queued(store: LeaseStore, request_id: str = "", order: int | None = None) -> Ticket:
    owner = f"owner-{next(_numbers)}"
    ticket = await store.enqueue(lease_request(request_id), owner, order)
    assert isinstance(ticket, Ticket)
    return ticket


def claims_for(worker: Worker, slot: int = 0) -> lease_pb2.LeaseClaims:
    return lease_pb2.LeaseClaims(
        lease_id=f"lease-{next(_numbers)}",
        worker_id=worker.worker_id,
        worker_epoch=worker.epoch,
        slot=slot,
        kind=AUDIO,
    )


async def granted(
    store: LeaseStore, worker: Worker, slot: int = 0, claim_timeout_s: float = LONG_S
) -> Grant:
    offer = Offer(claims_for(worker, slot), claim_timeout_s)
    grant = await store.try_grant(await queued(store), offer)
    assert grant
    return grant
