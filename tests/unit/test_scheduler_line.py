"""What becomes of a waiter's ticket or grant, at the moments that a socket seldom shows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator

import pytest
from scheduler_world import AUDIO, register_message

from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.v1 import admin_pb2, lease_pb2, registry_pb2
from duplane.scheduler.attachment import OUTBOX_LENGTH, Attachment
from duplane.scheduler.feed import BACKLOG_LENGTH, Feed
from duplane.scheduler.line import Line, Waiter
from duplane.scheduler.policy import assign
from duplane.scheduler.store.base import Grant, Wish, Worker
from duplane.scheduler.store.memory import MemoryStore
from duplane.scheduler.view import View


class Fabric:
    """Store, view and line of one scheduler, and grants by hand."""

    def __init__(self) -> None:
        self.store = MemoryStore(1_700_000_000_000)
        self.view = View(time.monotonic)
        self.line = Line(self.store, self.view, limit=10)
        self.feed = Feed(self.view, ticket_limit=10)
        self.store.subscribe(self.view.apply)

    async def attach(self, slot_count: int = 1) -> Worker:
        worker = await self.store.register(register_message(slot_count=slot_count))
        assert worker
        return worker

    async def grant(self) -> Grant:
        (due, *_) = assign(self.view.queue(""), self.view.pool_candidates(""))
        wish = due.ticket.wish
        proposal = Grant(
            token=0,
            lease_id=f"lease-{wish.request_id}",
            worker_id=due.worker.worker_id,
            worker_epoch=due.worker.epoch,
            slot=due.slot,
            kind=wish.kind,
            ticket=due.ticket,
        )
        grant = await self.store.try_grant(proposal, 60)
        assert grant
        return grant


def request(request_id: str = "r", ticket_id: str = "") -> lease_pb2.AcquireLeaseRequest:
    return lease_pb2.AcquireLeaseRequest(request_id=request_id, kind=AUDIO, ticket_id=ticket_id)


def reason(waiter: Waiter) -> Reason | None:
    return waiter.failure.reason if waiter.failure else None


async def test_waiter_that_leaves_takes_its_ticket_along() -> None:
    fabric = Fabric()
    async with fabric.line.stand(request()) as waiter:
        place = fabric.line.place(waiter)
        assert place
        assert place.position == 1
    assert not fabric.view.tickets


async def test_undelivered_grant_goes_back_at_once() -> None:
    fabric = Fabric()
    await fabric.attach()
    async with fabric.line.stand(request()) as waiter:
        grant = await fabric.grant()
        assert waiter.grant == grant
        assert waiter.changed.is_set()
    assert not fabric.view.grants


async def test_delivered_grant_stays_when_its_call_ends() -> None:
    fabric = Fabric()
    await fabric.attach()
    async with fabric.line.stand(request()) as waiter:
        grant = await fabric.grant()
        waiter.is_delivered = True
    assert list(fabric.view.grants.values()) == [grant]


async def test_cancelled_call_gives_back_what_it_holds() -> None:
    fabric, is_standing = Fabric(), asyncio.Event()
    await fabric.attach()

    async def call() -> None:
        async with fabric.line.stand(request()):
            is_standing.set()
            await asyncio.Event().wait()

    waiting = asyncio.create_task(call())
    await is_standing.wait()
    await fabric.grant()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not fabric.view.grants
    assert not fabric.view.wishes


async def test_grant_lost_before_it_was_told_is_waited_for_again_from_the_old_place() -> None:
    fabric = Fabric()
    worker = await fabric.attach()
    async with fabric.line.stand(request("first")) as first, fabric.line.stand(request("second")):
        order = first.order
        await fabric.grant()
        await fabric.store.unregister(worker.worker_id, worker.epoch)
        assert first.grant is None
        assert first.has_lost_grant
        await fabric.line.rejoin(first)
        assert first.order == order
        await fabric.attach()
        assert await fabric.grant() == first.grant
    assert not fabric.view.wishes


async def test_repeated_call_delivers_what_the_first_had_not() -> None:
    fabric = Fabric()
    await fabric.attach()
    async with fabric.line.stand(request()) as first:
        grant = await fabric.grant()
        async with fabric.line.stand(request()) as second:
            assert reason(first) is Reason.SUPERSEDED
            assert second.grant == grant
            assert not second.is_delivered
        assert not fabric.view.grants, "the call that took over has left with it"
    async with fabric.line.stand(request()) as third:
        assert third.grant is None


async def test_repeated_call_that_fails_leaves_a_delivered_grant_alone() -> None:
    fabric = Fabric()
    await fabric.attach()
    async with fabric.line.stand(request()) as first:
        grant = await fabric.grant()
        first.is_delivered = True
    async with fabric.line.stand(request()) as second:
        assert second.grant == grant
    assert list(fabric.view.grants.values()) == [grant]


async def test_superseded_call_takes_nothing_along() -> None:
    fabric = Fabric()
    async with fabric.line.stand(request()) as first:
        ticket = fabric.view.tickets[first.order or 0]
        async with fabric.line.stand(request("other", ticket.ticket_id)) as second:
            assert reason(first) is Reason.SUPERSEDED
            assert second.order == first.order
            async with fabric.line.stand(request("other")) as third:
                assert reason(second) is Reason.SUPERSEDED
                assert third.order == first.order
            assert not fabric.view.tickets


async def test_call_from_the_place_of_an_undelivered_grant_ends_the_former() -> None:
    fabric = Fabric()
    await fabric.attach()
    async with fabric.line.stand(request("first")) as first:
        grant = await fabric.grant()
        assert grant.ticket
        async with fabric.line.stand(request("second", grant.ticket.ticket_id)) as second:
            assert reason(first) is Reason.SUPERSEDED
            assert not fabric.view.grants
            assert second.order == first.order
            assert (await fabric.grant()) == second.grant


async def test_closed_line_ends_its_waits_and_admits_nobody() -> None:
    fabric = Fabric()
    async with fabric.line.stand(request()) as waiter:
        fabric.line.close()
        assert reason(waiter) is Reason.UNAVAILABLE
    with pytest.raises(FabricError) as refused:
        async with fabric.line.stand(request()):
            pass
    assert refused.value.reason is Reason.UNAVAILABLE


async def test_slow_reader_gets_the_whole_in_place_of_what_it_missed() -> None:
    fabric = Fabric()
    quick, slow = fabric.feed.watch(), fabric.feed.watch()
    assert (await anext(quick)).HasField("snapshot")
    assert (await anext(slow)).HasField("snapshot")
    for count in range(BACKLOG_LENGTH // 2 + 1):
        ticket = await fabric.store.enqueue(Wish(f"r{count}", "o", AUDIO))
        assert not isinstance(ticket, Grant)
        assert (await anext(quick)).ticket.ticket_id == ticket.ticket_id
        await fabric.store.cancel(ticket.order)
        assert (await anext(quick)).removed_ticket_id == ticket.ticket_id
    last = await fabric.store.enqueue(Wish("last", "o", AUDIO))
    assert not isinstance(last, Grant)
    snapshot = (await anext(slow)).snapshot
    assert [one.ticket_id for one in snapshot.tickets] == [last.ticket_id]
    await fabric.store.cancel(last.order)
    assert (await anext(slow)).removed_ticket_id == last.ticket_id
    fabric.feed.close()
    for reader in (quick, slow):
        with pytest.raises(FabricError):
            await drained(reader)


async def drained(reader: AsyncGenerator[admin_pb2.WatchResponse]) -> None:
    async for _ in reader:
        pass


class Unread:
    """A stream whose other side has stopped reading."""

    def __init__(self) -> None:
        self.is_writing = asyncio.Event()

    async def write(self, message: object) -> None:
        self.is_writing.set()
        await asyncio.Event().wait()


async def test_worker_that_does_not_read_loses_its_stream() -> None:
    stream, attachment = Unread(), Attachment(Worker(1, register_message(), is_draining=False))
    sending = asyncio.create_task(attachment.send(stream))  # pyright: ignore[reportArgumentType]
    failing = asyncio.create_task(attachment.fail())
    attachment.tell(registry_pb2.AttachResponse())
    await stream.is_writing.wait()
    for _ in range(OUTBOX_LENGTH):
        attachment.tell(registry_pb2.AttachResponse())
    await asyncio.sleep(0)
    assert not failing.done()
    attachment.tell(registry_pb2.AttachResponse())
    with pytest.raises(FabricError) as ended:
        await failing
    assert ended.value.reason is Reason.UNAVAILABLE
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
