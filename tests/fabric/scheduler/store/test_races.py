"""Two schedulers on one etcd. At the worst moment, one of them changes data or loses an answer."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from support.scheduler.etcd_server import EtcdCluster
from support.scheduler.racing_stores import Pair, Scheduler, settled
from support.scheduler.scheduler_harness import FREE, register_message
from support.time_limits import WITHIN_S

from duplane.fabric.errors import FabricError
from duplane.fabric.v1 import registry_pb2
from duplane.scheduler.store.base import Grant, Ticket, TicketGone, WorkerGone
from duplane.scheduler.store.etcd import operations
from duplane.scheduler.store.etcd import store as etcd_store


async def test_slot_is_granted_once(pair: Pair) -> None:
    one, other = pair
    worker = await one.worker()
    first = await one.ticket("first")
    second = await other.ticket("second")
    await settled(pair)
    one.etcd.before_next = lambda: other.grant(second, worker)
    assert await one.grant(first, worker) is None
    await settled(pair)
    assert list(one.facts.granted) == ["second"]
    assert list(one.facts.tickets.values()) == [first]


async def test_ticket_is_granted_once(pair: Pair) -> None:
    one, other = pair
    worker = await one.worker(slot_count=2)
    ticket = await one.ticket("r")
    await settled(pair)
    one.etcd.before_next = lambda: other.grant(ticket, worker, 1)
    assert await one.grant(ticket, worker, 0) is None
    await settled(pair)
    assert [grant.claims.slot for grant in one.facts.granted.values()] == [1]
    assert len(one.facts.live_slots("w")) == 1


async def test_slot_is_granted_at_once_to_one_request(pair: Pair) -> None:
    one, other = pair
    worker = await one.worker()
    await settled(pair)
    one.etcd.before_next = lambda: other.at_once("second", worker)
    assert isinstance(await one.at_once("first", worker), Ticket)
    await settled(pair)
    assert list(one.facts.granted) == ["second"]


async def test_request_that_arrives_meanwhile_is_not_overtaken_by_a_grant_at_once(
    pair: Pair,
) -> None:
    one, other = pair
    worker = await one.worker()
    await settled(pair)
    one.etcd.before_next = lambda: other.enqueue("ahead")
    behind = await one.at_once("behind", worker)
    assert isinstance(behind, Ticket)
    await settled(pair)
    assert [one.facts.tickets[order].request.request_id for order in sorted(one.facts.tickets)] == [
        "ahead",
        "behind",
    ]


async def test_ticket_that_is_cancelled_meanwhile_is_not_granted(pair: Pair) -> None:
    one, other = pair
    worker = await one.worker()
    ticket = await one.ticket("r")
    await settled(pair)
    one.etcd.before_next = lambda: other.store.cancel(ticket.order)
    assert await one.grant(ticket, worker) is None
    assert not one.facts.granted


async def test_former_registration_is_not_granted_from(pair: Pair) -> None:
    one, other = pair
    worker = await one.worker()
    ticket = await one.ticket("r")
    await settled(pair)
    one.etcd.before_next = other.worker
    assert await one.grant(ticket, worker) is None
    assert one.facts.workers["w"].epoch > worker.epoch


async def test_grant_that_another_makes_ends_with_its_worker(pair: Pair) -> None:
    one, other = pair
    worker = await one.worker()
    ticket = await other.ticket("r")
    await settled(pair)
    one.etcd.before_next = lambda: other.grant(ticket, worker)
    assert await one.store.unregister("w", worker.epoch)
    await settled(pair)
    assert not one.facts.granted
    assert not one.facts.requests, "the request is taken for granted for ever"
    assert isinstance(await one.enqueue("r"), Ticket)


async def test_request_at_two_schedulers_has_one_ticket(pair: Pair) -> None:
    one, other = pair
    await settled(pair)
    one.etcd.before_next = lambda: other.enqueue("r")
    ticket = await one.ticket("r")
    await settled(pair)
    assert list(one.facts.tickets.values()) == [ticket]


async def test_request_that_is_granted_meanwhile_gets_the_grant(pair: Pair) -> None:
    one, other = pair
    worker = await one.worker()
    ticket = await other.ticket("r")
    await settled(pair)
    one.etcd.before_next = lambda: other.grant(ticket, worker)
    found = await one.enqueue("r")
    assert isinstance(found, Grant)
    assert found.ticket == ticket


async def test_old_order_is_taken_by_one_request(pair: Pair) -> None:
    one, other = pair
    former = await one.ticket("former")
    await one.ticket("behind")
    await one.store.cancel(former.order)
    await settled(pair)
    one.etcd.before_next = lambda: other.ticket("second", former.order)
    first = await one.ticket("first", former.order)
    await settled(pair)
    names = set(one.facts.requests)
    assert (first.order, names) == (former.order, {"first", "behind"}), "two at one order"


async def test_order_from_another_scheduler_is_known_at_once(pair: Pair) -> None:
    one, other = pair
    former = await one.ticket("former")
    await one.store.cancel(former.order)
    assert (await other.ticket("late", former.order)).order == former.order


@pytest.mark.parametrize("lost", ["executed", "executed later"])
async def test_lost_answer_changes_nothing_for_the_caller(pair: Pair, lost: str) -> None:
    one, other = pair
    worker = await one.worker()
    gone = list[TicketGone]()
    one.store.subscribe(
        lambda change: gone.append(change) if isinstance(change, TicketGone) else None
    )
    one.etcd.next_fault = lost
    ticket = await one.ticket("r")
    one.etcd.next_fault = lost
    grant = await one.grant(ticket, worker)
    assert grant
    one.etcd.next_fault = lost
    assert await one.store.claim(grant)
    await settled(pair)
    assert [(one.ticket, one.is_granted) for one in gone] == [(ticket, True)]
    assert other.facts.granted["r"].is_claimed


async def test_transaction_that_arrives_late_is_void(pair: Pair) -> None:
    """A frozen leader may execute a request long after its caller has given up."""
    one, _ = pair
    one.etcd.next_fault = "executed later"
    ticket = await one.ticket("r")
    assert await one.store.cancel(ticket.order)
    assert await one.etcd.execute_late() == [False]
    await settled(pair)
    assert not one.facts.tickets


async def test_arrival_whose_caller_leaves_is_undone(pair: Pair) -> None:
    one, other = pair
    await one.worker()
    has_sent = asyncio.Event()

    async def leave() -> None:
        has_sent.set()
        await asyncio.sleep(0)  # the caller is cancelled before the transaction is sent

    one.etcd.before_next = leave
    waiting = asyncio.create_task(one.enqueue("r"))
    await has_sent.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await one.until(lambda: "r" in one.facts.requests)
    behind = await one.ticket("behind")
    await one.until(lambda: set(one.facts.tickets) == {behind.order})
    await settled(pair)
    assert set(other.facts.tickets) == {behind.order}


async def test_all_grants_of_a_large_worker_end_with_it(pair: Pair) -> None:
    one, other = pair
    worker = await one.worker(slot_count=130)
    for slot in range(130):
        assert await one.grant(await one.ticket(f"r{slot}"), worker, slot)
    later = await other.worker(slot_count=130)
    await settled(pair)
    assert not one.facts.granted
    assert not one.facts.requests
    assert await other.store.unregister("w", later.epoch)


async def test_numbers_stay_above_those_of_a_restored_backup(pair: Pair) -> None:
    """If a worker reports a higher number than any in the store, later numbers are above it."""
    one, other = pair
    seen = one.facts.number + 10_000_000
    slots = [registry_pb2.SlotReport(slot=0, state=FREE, fencing_number=seen)]
    before = await other.ticket("before")
    worker = await one.store.register(register_message("w", slots=slots))
    assert worker
    assert worker.epoch > seen
    behind = await other.ticket("behind")
    assert before.order < worker.epoch < behind.order
    grant = await other.grant(before, worker)
    assert grant
    assert grant.claims.fencing_number > behind.order


async def test_store_that_has_lost_its_data_begins_anew(tmp_path: Path) -> None:
    async with EtcdCluster.running(tmp_path) as etcd:
        one = Scheduler(etcd.url("/d/"))
        running = asyncio.create_task(one.store.run())
        worker = await one.worker()
        gone = asyncio.Event()
        for number in range(20):
            await one.ticket(f"r{number}")
        grant = await one.grant(one.facts.tickets[min(one.facts.tickets)], worker)
        assert grant
        one.store.subscribe(lambda change: gone.set() if isinstance(change, WorkerGone) else None)
        highest = one.facts.number
        etcd.kill()
        shutil.rmtree(tmp_path / "m0")
        await etcd.start()
        async with asyncio.timeout(WITHIN_S):
            await gone.wait()
        assert not one.facts.tickets
        assert (await one.ticket("new")).order > highest
        seen = grant.claims.fencing_number
        slots = [registry_pb2.SlotReport(slot=0, state=FREE, fencing_number=seen)]
        again = await one.store.register(register_message("w", slots=slots))
        assert again
        assert again.epoch > seen
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_request_that_was_given_up_does_not_take_the_ticket_of_a_later_call(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair
    monkeypatch.setattr(etcd_store, "ARRIVAL_TIMEOUT_S", 1.0)
    answers = asyncio.Event()
    one.etcd.before_next = answers.wait
    with pytest.raises(FabricError, match="the store does not answer"):
        await one.ticket("request")
    later = await other.ticket("request")
    answers.set()
    await one.until_none_waits()
    await settled(pair)
    assert other.facts.tickets == {later.order: later}


async def test_late_end_of_a_registration_spares_the_grants_of_the_next_one(pair: Pair) -> None:
    one, other = pair
    count = operations.MAX_ENDED_COUNT + 1
    former = await one.worker(count)
    present = await other.worker(count)
    for slot in range(count):
        assert await other.grant(await other.ticket(str(slot)), present, slot)
    assert not await one.store.unregister("w", former.epoch)
    assert await one.store.register(register_message("w", count, incarnation="another")) is None
    await settled(pair)
    assert len(one.facts.granted) == count


@pytest.mark.parametrize("key", ["worker/w", "slot/w/x", "slot", "base", "request/r"])
async def test_record_that_cannot_be_read_is_ignored(pair: Pair, key: str) -> None:
    one, _ = pair
    await one.etcd.put(one.facts.keys.prefix + key.encode(), b"\xff")
    await asyncio.wait_for(settled(pair), WITHIN_S)
