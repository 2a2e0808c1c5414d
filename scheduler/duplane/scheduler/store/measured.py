"""A lease store with metrics of its operations and of the scheduler's contact to it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from duplane.fabric.monitoring.metrics import Observed, counters, gauge, histograms
from duplane.fabric.v1 import lease_pb2, registry_pb2
from duplane.scheduler.store.base import (
    Change,
    DrainRequest,
    Grant,
    LeaseStore,
    Offer,
    TenantTime,
    Ticket,
    Worker,
)

_Answer = TypeVar("_Answer")

OPERATIONS = (
    "adopt",
    "cancel",
    "claim",
    "drain",
    "enqueue",
    "give_back",
    "register",
    "release",
    "report",
    "save_time",
    "set_unreachable",
    "try_grant",
    "unregister",
)
"""The operations of a store, without those that set it up, run it and end it."""

_OUTCOMES = ("done", "void", "failed")  # void: the operation's object had ended or changed
_BUCKETS_S = (0.0001, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)


class MeasuredStore(LeaseStore):
    """Passes every call on to another store. Counts and times the calls in `OPERATIONS`."""

    def __init__(self, store: LeaseStore, registry: CollectorRegistry) -> None:
        self._store = store
        self._counts = counters(
            registry,
            "duplane_store_operations_total",
            "Operations of the lease store.",
            operation=OPERATIONS,
            outcome=_OUTCOMES,
        )
        self._durations = histograms(
            registry,
            "duplane_store_operation_duration_seconds",
            "Duration of the lease store's operations.",
            _BUCKETS_S,
            operation=OPERATIONS,
        )
        self._contact_losses = counters(
            registry,
            "duplane_store_contact_losses_total",
            "Times at which the scheduler lost the contact to its store.",
        ).of()
        self._has_contact = True
        self._refusal = ""
        Observed(registry, self._observe)
        store.watch_contact(self._on_contact)
        store.watch_refusal(self._on_refusal)

    @property
    def has_kept_queue(self) -> bool:
        return self._store.has_kept_queue

    @property
    def ticket_key(self) -> bytes:
        return self._store.ticket_key

    def may_be_former(self, order: int) -> bool:
        return self._store.may_be_former(order)

    def subscribe(self, listener: Callable[[Change], None]) -> None:
        self._store.subscribe(listener)

    async def until_read(self) -> None:
        await self._store.until_read()

    async def until_whole(self) -> None:
        await self._store.until_whole()

    def watch_contact(self, listener: Callable[[bool], None]) -> None:
        self._store.watch_contact(listener)

    def watch_refusal(self, listener: Callable[[str], None]) -> None:
        self._store.watch_refusal(listener)

    def share_keys(self, keys: Sequence[registry_pb2.VerificationKey]) -> None:
        self._store.share_keys(keys)

    def watch_keys(
        self, listener: Callable[[Sequence[registry_pb2.VerificationKey]], None]
    ) -> None:
        self._store.watch_keys(listener)

    async def run(self) -> None:
        await self._store.run()

    async def leave(self) -> None:
        await self._store.leave()

    async def register(self, register: registry_pb2.Register) -> Worker | None:
        return await self._measure("register", self._store.register(register))

    async def report(self, worker: Worker) -> bool:
        return await self._measure("report", self._store.report(worker))

    async def drain(self, worker_id: str, request: DrainRequest = DrainRequest.DRAIN) -> bool:
        return await self._measure("drain", self._store.drain(worker_id, request))

    async def set_unreachable(self, worker_id: str, epoch: int, *, is_unreachable: bool) -> bool:
        setting = self._store.set_unreachable(worker_id, epoch, is_unreachable=is_unreachable)
        return await self._measure("set_unreachable", setting)

    async def unregister(self, worker_id: str, epoch: int) -> bool:
        return await self._measure("unregister", self._store.unregister(worker_id, epoch))

    async def enqueue(
        self,
        request: lease_pb2.AcquireLeaseRequest,
        owner: str,
        order: int | None = None,
        offer: Offer | None = None,
        holder: bytes = b"",
    ) -> Ticket | Grant:
        enqueuing = self._store.enqueue(request, owner, order, offer, holder)
        return await self._measure("enqueue", enqueuing)

    async def cancel(self, order: int, owner: str | None = None) -> bool:
        return await self._measure("cancel", self._store.cancel(order, owner))

    async def try_grant(self, ticket: Ticket, offer: Offer) -> Grant | None:
        return await self._measure("try_grant", self._store.try_grant(ticket, offer))

    async def claim(self, grant: Grant) -> bool:
        return await self._measure("claim", self._store.claim(grant))

    async def give_back(self, grant: Grant, *, is_end: bool = False) -> bool:
        return await self._measure("give_back", self._store.give_back(grant, is_end=is_end))

    async def release(self, grant: Grant) -> bool:
        return await self._measure("release", self._store.release(grant))

    async def adopt(self, grant: Grant) -> bool:
        return await self._measure("adopt", self._store.adopt(grant))

    async def save_time(self, time: TenantTime) -> bool:
        return await self._measure("save_time", self._store.save_time(time))

    async def _measure(self, name: str, operation: Awaitable[_Answer]) -> _Answer:
        """Run an operation to its end. An answer that is false counts as void."""
        began_s = time.perf_counter()
        try:
            answer = await operation
        except BaseException:
            self._counts.of(name, "failed").inc()
            raise
        self._durations.of(name).observe(time.perf_counter() - began_s)
        self._counts.of(name, "done" if answer else "void").inc()
        return answer

    def _on_contact(self, is_lost: bool) -> None:
        self._has_contact = not is_lost
        if is_lost:
            self._contact_losses.inc()

    def _on_refusal(self, refusal: str) -> None:
        self._refusal = refusal

    def _observe(self) -> Iterable[Metric]:
        yield gauge(
            "duplane_store_contact",
            "1 while the scheduler has contact to its store; without contact it refuses all calls.",
            float(self._has_contact),
        )
        yield gauge(
            "duplane_store_writable",
            "1 while the store accepts changes; else the scheduler grants no slot, and no worker "
            "can register.",
            float(not self._refusal),
        )
