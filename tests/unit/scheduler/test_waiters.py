"""Waiting calls: tickets and grants in states that tests over sockets rarely produce."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from support.scheduler.scheduler_harness import AUDIO, OMNI, register_message

from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.v1 import admin_pb2, lease_pb2
from duplane.scheduler.holders import ticket_proof
from duplane.scheduler.quotas import Quotas
from duplane.scheduler.state import SchedulerState
from duplane.scheduler.store.base import (
    Change,
    Grant,
    GrantGone,
    Offer,
    Ticket,
    TicketPut,
    Worker,
)
from duplane.scheduler.store.memory import MemoryStore
from duplane.scheduler.waiters import Enqueue, Waiter, Waiters
from duplane.scheduler.watch import BACKLOG_LENGTH, Watch


class LocalScheduler:
    """Store, state and waiters of one scheduler. The test makes each grant."""

    def __init__(self, enqueue: Enqueue | None = None) -> None:
        self.store = MemoryStore(1_700_000_000_000)
        self.state = SchedulerState(time.monotonic)
        quotas = Quotas(self.store, self.state, 10, lambda: 0.0)
        self.waiters = Waiters(self.store, self.state, 10, quotas, enqueue)
        self.watch = Watch(self.state, ticket_limit=10)
        self.store.subscribe(self.state.apply)

    async def attach(self, slot_count: int = 1) -> Worker:
        worker = await self.store.register(register_message(slot_count=slot_count))
        assert worker
        return worker

    async def grant(self) -> Grant:
        proposal = self.state.next_grant("")
        assert proposal
        ticket, candidate = proposal
        claims = lease_pb2.LeaseClaims(
            lease_id=f"lease-{ticket.request.request_id}",
            worker_id=candidate.worker.worker_id,
            worker_epoch=candidate.worker.epoch,
            slot=candidate.free_slots[0],
            kind=ticket.request.kind,
        )
        grant = await self.store.try_grant(ticket, Offer(claims, 60))
        assert grant
        return grant


def request(request_id: str = "r", ticket_id: str = "") -> lease_pb2.AcquireLeaseRequest:
    return lease_pb2.AcquireLeaseRequest(request_id=request_id, kind=AUDIO, ticket_id=ticket_id)


def reason(waiter: Waiter) -> Reason | None:
    return waiter.failure.reason if waiter.failure else None


async def test_ticket_is_cancelled_when_its_call_ends() -> None:
    scheduler = LocalScheduler()
    async with scheduler.waiters.waiting(request()) as waiter:
        entry = scheduler.waiters.entry(waiter)
        assert entry
        assert entry.position == 1
    assert not scheduler.state.tickets


async def test_caller_may_return_before_the_worker_of_its_kind() -> None:
    scheduler = LocalScheduler()
    async with scheduler.waiters.waiting(request()) as waiter:
        entry = scheduler.waiters.entry(waiter)
        assert entry
    await scheduler.store.register(register_message(kinds=[OMNI]))
    with pytest.raises(FabricError, match="no worker") as refused:
        async with scheduler.waiters.waiting(request("new")):
            pass
    assert refused.value.reason is Reason.KIND_NOT_SERVED
    proof = ticket_proof(scheduler.store.ticket_key, entry.ticket.order, b"")
    returning = request("r", entry.ticket.ticket_id)
    async with scheduler.waiters.waiting(returning, proof=proof) as waiter:
        assert waiter.order == entry.ticket.order


async def test_undelivered_grant_is_given_back_at_once() -> None:
    scheduler = LocalScheduler()
    await scheduler.attach()
    async with scheduler.waiters.waiting(request()) as waiter:
        grant = await scheduler.grant()
        assert waiter.grant == grant
        assert waiter.changed.is_set()
    assert not scheduler.state.grants


async def test_returning_ticket_is_in_the_queue_before_its_former_grant_ends() -> None:
    """If the grant ended first, the next ticket could get the slot of the returning ticket."""
    scheduler = LocalScheduler()
    await scheduler.attach()
    async with scheduler.waiters.waiting(request("first")) as waiter:
        grant = await scheduler.grant()
        waiter.is_delivered = True
    assert grant.ticket
    changes: list[Change] = []
    scheduler.store.subscribe(changes.append)
    changes.clear()
    async with scheduler.waiters.waiting(request("again", grant.ticket.ticket_id)) as waiter:
        assert waiter.order == grant.ticket.order
        put, gone = changes
        assert isinstance(put, TicketPut)
        assert isinstance(gone, GrantGone)


async def test_delivered_grant_stays_when_its_call_ends() -> None:
    scheduler = LocalScheduler()
    await scheduler.attach()
    async with scheduler.waiters.waiting(request()) as waiter:
        grant = await scheduler.grant()
        waiter.is_delivered = True
    assert list(scheduler.state.grants.values()) == [grant]


async def test_grant_that_ends_before_the_repeated_call_learns_of_it_is_not_used() -> None:
    grants: list[Grant] = []

    async def enqueue_late(*arguments: Any) -> Ticket | Grant:
        *others, holder = arguments
        found = await scheduler.store.enqueue(*others, holder=holder)
        for grant in grants:
            await scheduler.store.give_back(grant)
        return found

    scheduler = LocalScheduler(enqueue_late)
    await scheduler.attach()
    async with scheduler.waiters.waiting(request()) as first:
        grants.append(await scheduler.grant())
        first.is_delivered = True
        async with scheduler.waiters.waiting(request()) as second:
            assert second.grant is None
            assert scheduler.waiters.entry(second)


async def test_call_whose_ticket_ended_in_missed_events_returns_to_its_place() -> None:
    async def enqueue(wanted: lease_pb2.AcquireLeaseRequest, owner: str, *_: object) -> Ticket:
        return Ticket(5, owner, wanted)

    scheduler = LocalScheduler(enqueue)
    async with scheduler.waiters.waiting(request()) as waiter:
        assert waiter.has_lost_place


async def test_ticket_taken_over_by_another_demand_waits_in_one_queue_only() -> None:
    scheduler = LocalScheduler()
    ticket = await scheduler.store.enqueue(request(), "owner")
    assert isinstance(ticket, Ticket)
    other = lease_pb2.AcquireLeaseRequest(
        request_id="other", kind=OMNI, needs={"zone": "a"}, ticket_id=ticket.ticket_id
    )
    await scheduler.store.enqueue(other, "another", ticket.order)
    (pool,) = scheduler.state._pools.values()
    (queue,) = pool.queues.values()
    assert [entry.ticket.request for entry in queue] == [other]
    await scheduler.store.cancel(ticket.order)
    assert not scheduler.state.waiting_pools


async def test_call_that_has_found_a_grant_waits_again_if_the_grant_ends() -> None:
    """The grant was made for a call at another scheduler, which may have delivered it."""
    scheduler = LocalScheduler()
    worker = await scheduler.attach()
    ticket = await scheduler.store.enqueue(request(), "elsewhere")
    grant = await scheduler.grant()
    async with scheduler.waiters.waiting(request()) as waiter:
        assert waiter.grant == grant
        await scheduler.store.unregister(worker.worker_id, worker.epoch)
        assert waiter.has_lost_place
        await scheduler.waiters.enqueue_again(waiter)
        assert isinstance(ticket, Ticket)
        assert waiter.order == ticket.order
        assert scheduler.waiters.entry(waiter)


async def test_cancelled_call_gives_back_what_it_holds() -> None:
    scheduler = LocalScheduler()
    is_waiting = asyncio.Event()
    await scheduler.attach()

    async def call() -> None:
        async with scheduler.waiters.waiting(request()):
            is_waiting.set()
            await asyncio.Event().wait()

    waiting = asyncio.create_task(call())
    await is_waiting.wait()
    await scheduler.grant()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not scheduler.state.grants
    assert not scheduler.state.requests


async def test_call_whose_grant_ended_before_delivery_waits_again_at_its_old_place() -> None:
    scheduler = LocalScheduler()
    worker = await scheduler.attach()
    async with (
        scheduler.waiters.waiting(request("first")) as first,
        scheduler.waiters.waiting(request("second")),
    ):
        order = first.order
        await scheduler.grant()
        await scheduler.store.unregister(worker.worker_id, worker.epoch)
        assert first.grant is None
        assert first.has_lost_place
        await scheduler.waiters.enqueue_again(first)
        assert first.order == order
        await scheduler.attach()
        assert await scheduler.grant() == first.grant
    assert not scheduler.state.requests


async def test_repeated_call_takes_over_an_undelivered_grant() -> None:
    scheduler = LocalScheduler()
    await scheduler.attach()
    async with scheduler.waiters.waiting(request()) as first:
        grant = await scheduler.grant()
        async with scheduler.waiters.waiting(request()) as second:
            assert reason(first) is Reason.SUPERSEDED
            assert second.grant == grant
            assert not second.is_delivered
        assert not scheduler.state.grants, "the call that took it over ended, and the grant remains"
    async with scheduler.waiters.waiting(request()) as third:
        assert third.grant is None


async def test_repeated_call_that_fails_leaves_a_delivered_grant_alone() -> None:
    scheduler = LocalScheduler()
    await scheduler.attach()
    async with scheduler.waiters.waiting(request()) as first:
        grant = await scheduler.grant()
        first.is_delivered = True
    async with scheduler.waiters.waiting(request()) as second:
        assert second.grant == grant
    assert list(scheduler.state.grants.values()) == [grant]


async def test_superseded_call_gives_nothing_back() -> None:
    scheduler = LocalScheduler()
    async with scheduler.waiters.waiting(request()) as first:
        ticket = scheduler.state.tickets[first.order or 0]
        async with scheduler.waiters.waiting(request("other", ticket.ticket_id)) as second:
            assert reason(first) is Reason.SUPERSEDED
            assert second.order == first.order
            async with scheduler.waiters.waiting(request("other")) as third:
                assert reason(second) is Reason.SUPERSEDED
                assert third.order == first.order
            assert not scheduler.state.tickets


async def test_call_with_the_ticket_of_an_undelivered_grant_ends_the_former_call() -> None:
    scheduler = LocalScheduler()
    await scheduler.attach(slot_count=2)
    async with scheduler.waiters.waiting(request("first")) as first:
        grant = await scheduler.grant()
        assert grant.ticket
        async with scheduler.waiters.waiting(request("second", grant.ticket.ticket_id)) as second:
            assert reason(first) is Reason.SUPERSEDED
            assert not scheduler.state.grants
            assert second.order == first.order
            assert (await scheduler.grant()) == second.grant


async def test_close_ends_every_wait_and_refuses_new_ones() -> None:
    scheduler = LocalScheduler()
    async with scheduler.waiters.waiting(request()) as waiter:
        scheduler.waiters.refuse("the scheduler is stopping")
        assert reason(waiter) is Reason.UNAVAILABLE
    with pytest.raises(FabricError) as refused:
        async with scheduler.waiters.waiting(request()):
            pass
    assert refused.value.reason is Reason.UNAVAILABLE


async def test_slow_watcher_gets_a_snapshot_in_place_of_what_it_missed() -> None:
    scheduler = LocalScheduler()
    quick, slow = scheduler.watch.steps(), scheduler.watch.steps()
    assert (await anext(quick)).HasField("snapshot")
    assert (await anext(slow)).HasField("snapshot")
    for count in range(BACKLOG_LENGTH // 2 + 1):
        ticket = await scheduler.store.enqueue(request(f"r{count}"), "owner")
        assert not isinstance(ticket, Grant)
        assert (await anext(quick)).ticket.ticket_id == ticket.ticket_id
        await scheduler.store.cancel(ticket.order)
        assert (await anext(quick)).removed_ticket_id == ticket.ticket_id
    last = await scheduler.store.enqueue(request("last"), "owner")
    assert not isinstance(last, Grant)
    snapshot = (await anext(slow)).snapshot
    assert [one.ticket_id for one in snapshot.tickets] == [last.ticket_id]
    await scheduler.store.cancel(last.order)
    assert (await anext(slow)).removed_ticket_id == last.ticket_id
    scheduler.watch.refuse("the scheduler is stopping")
    for reader in (quick, slow):
        with pytest.raises(FabricError):
            await drained(reader)


async def drained(reader: AsyncGenerator[admin_pb2.WatchResponse]) -> None:
    async for _ in reader:
        pass
