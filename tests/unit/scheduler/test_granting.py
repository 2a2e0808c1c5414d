"""The grant loop on a memory store, without gRPC calls."""

from __future__ import annotations

import asyncio

import pytest
from support.scheduler.scheduler_harness import (
    AUDIO,
    CLEANING,
    FREE,
    register_message,
    slot_reports,
)
from support.time_limits import WITHIN_S

from duplane.fabric.v1 import lease_pb2
from duplane.scheduler.granting import LATE_RETURN_S, GrantLoop
from duplane.scheduler.policy.placement import Candidate
from duplane.scheduler.state import SchedulerState
from duplane.scheduler.store.base import RETURN_S, Grant, Offer, Ticket
from duplane.scheduler.store.memory import MemoryStore


@pytest.mark.parametrize("has_served", [True, False])
async def test_slots_of_a_worker_that_has_served_are_held_back_after_a_start(
    has_served: bool,
) -> None:
    """The worker attaches to the store through another scheduler than the one under test."""
    state = SchedulerState(lambda: 0.0)
    store = MemoryStore(boot_ms=1)
    grants = GrantLoop(store, state, claim_timeout_s=5.0, resume_grace_s=3.0)
    store.subscribe(state.apply)
    slots = slot_reports(FREE)
    slots[0].fencing_number = 7 if has_served else 0
    await store.register(register_message(slots=slots))
    request = lease_pb2.AcquireLeaseRequest(request_id="r", kind=AUDIO)
    ticket = await store.enqueue(request, "owner")
    assert isinstance(ticket, Ticket)
    running = asyncio.create_task(grants.run())
    async with asyncio.timeout(WITHIN_S):
        await grants.settled(ticket.order)
    assert (state.entry(ticket) is not None) == has_served
    running.cancel()


async def test_slots_are_held_back_as_long_as_callers_return_but_not_for_ever() -> None:
    now = 0.0
    state = SchedulerState(lambda: now)
    store = MemoryStore(boot_ms=1)
    grants = GrantLoop(store, state, claim_timeout_s=5.0, resume_grace_s=1.0)
    store.subscribe(state.apply)
    slots = slot_reports(FREE, FREE)
    slots[0].fencing_number = 7
    await store.register(register_message(slots=slots))

    async def is_granted(name: str) -> bool:
        request = lease_pb2.AcquireLeaseRequest(request_id=name, kind=AUDIO)
        found = await grants.enqueue(request, "owner")
        if isinstance(found, Ticket):
            await store.cancel(found.order)
        return isinstance(found, Grant)

    async def returns(name: str) -> None:
        request = lease_pb2.AcquireLeaseRequest(request_id=name, kind=AUDIO)
        ticket = await grants.enqueue(request, "owner", 1)
        assert isinstance(ticket, Ticket)
        await store.cancel(ticket.order)

    now = RETURN_S - 0.01
    await returns("one")
    now = RETURN_S + LATE_RETURN_S - 0.06
    assert not await is_granted("early")
    await returns("another")
    now = 0.99
    assert not await is_granted("still early")
    now = 1.0
    assert await is_granted("late")


async def test_slots_are_granted_soon_if_no_caller_returns() -> None:
    now = 0.0
    state = SchedulerState(lambda: now)
    store = MemoryStore(boot_ms=1)
    grants = GrantLoop(store, state, claim_timeout_s=5.0, resume_grace_s=60.0)
    store.subscribe(state.apply)
    slots = slot_reports(FREE)
    slots[0].fencing_number = 7
    await store.register(register_message(slots=slots))
    request = lease_pb2.AcquireLeaseRequest(request_id="r", kind=AUDIO)
    now = RETURN_S
    assert isinstance(await grants.enqueue(request, "owner"), Grant)


async def test_slots_are_granted_at_once_after_a_start_if_the_store_has_kept_the_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(MemoryStore, "has_kept_queue", True)
    state = SchedulerState(lambda: 0.0)
    store = MemoryStore(boot_ms=1)
    grants = GrantLoop(store, state, claim_timeout_s=5.0, resume_grace_s=3.0)
    store.subscribe(state.apply)
    slots = slot_reports(FREE)
    slots[0].fencing_number = 7
    await store.register(register_message(slots=slots))
    request = lease_pb2.AcquireLeaseRequest(request_id="r", kind=AUDIO)
    assert isinstance(await grants.enqueue(request, "owner"), Grant)


async def test_no_slot_is_offered_from_a_state_that_is_not_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = SchedulerState(lambda: 0.0)
    store = MemoryStore(boot_ms=1)
    grants = GrantLoop(store, state, claim_timeout_s=5.0, resume_grace_s=3.0)
    store.subscribe(state.apply)
    worker = await store.register(register_message())
    assert worker
    offers: list[Offer | None] = []
    enqueue = store.enqueue

    async def remove_worker() -> None:
        await store.unregister(worker.worker_id, worker.epoch)

    async def note_offer(
        request: lease_pb2.AcquireLeaseRequest,
        owner: str,
        order: int | None = None,
        offer: Offer | None = None,
        holder: bytes = b"",
    ) -> Ticket | Grant:
        offers.append(offer)
        return await enqueue(request, owner, order, offer, holder)

    monkeypatch.setattr(store, "until_whole", remove_worker)
    monkeypatch.setattr(store, "enqueue", note_offer)
    request = lease_pb2.AcquireLeaseRequest(request_id="r", kind=AUDIO)
    assert isinstance(await grants.enqueue(request, "owner"), Ticket)
    assert offers == [None]


async def test_grants_do_not_wait_for_each_other() -> None:
    """Several grants are in progress together, each with its own slot and ticket."""
    state = SchedulerState(lambda: 0.0)
    store = MemoryStore(boot_ms=1)
    grants = GrantLoop(store, state, claim_timeout_s=5.0, resume_grace_s=3.0)
    store.subscribe(state.apply)
    tickets = [await queued(store, f"r{number}") for number in range(12)]
    offers: list[tuple[int, int]] = []
    all_begun, answers, all_done = asyncio.Event(), asyncio.Event(), asyncio.Event()
    try_grant = store.try_grant

    async def grant_late(ticket: Ticket, offer: Offer) -> Grant | None:
        offers.append((ticket.order, offer.claims.slot))
        if len(offers) == 10:
            all_begun.set()
        await answers.wait()
        return await try_grant(ticket, offer)

    store.try_grant = grant_late
    state.listeners.append(lambda _: all_done.set() if len(state.tickets) == 2 else None)
    running = asyncio.create_task(grants.run())
    await store.register(register_message(slot_count=10))
    async with asyncio.timeout(WITHIN_S):
        await all_begun.wait()
        answers.set()
        await all_done.wait()
    assert list(state.tickets) == [ticket.order for ticket in tickets[10:]]
    assert [order for order, _ in offers] == [ticket.order for ticket in tickets[:10]]
    assert sorted(slot for _, slot in offers) == list(range(10))
    running.cancel()


async def test_ticket_that_returns_to_its_place_is_granted_before_those_behind_it() -> None:
    state = SchedulerState(lambda: 0.0)
    store = MemoryStore(boot_ms=1)
    grants = GrantLoop(store, state, claim_timeout_s=5.0, resume_grace_s=3.0)
    store.subscribe(state.apply)
    former = await queued(store, "former")
    behind = await queued(store, "behind")
    await store.cancel(former.order)
    reserve = state.reserve
    has_begun = asyncio.Event()

    def noted(worker_id: str, slot: int, order: int | None = None) -> None:
        reserve(worker_id, slot, order)
        has_begun.set()

    state.reserve = noted
    running = asyncio.create_task(grants.run())
    await store.register(register_message())
    async with asyncio.timeout(WITHIN_S):
        await has_begun.wait()  # the grant of `behind` is about to begin
        back = await queued(store, "former", former.order)
        await grants.settled(back.order)
        await grants.settled(back.order)
    granted = [grant.ticket.order for grant in state.grants.values() if grant.ticket]
    assert granted == [back.order]
    assert list(state.tickets) == [behind.order]
    running.cancel()


async def test_ticket_gets_an_avoided_worker_though_its_time_ends_during_the_search() -> None:
    """Nothing else changes afterwards, so the loop must examine the queue again by itself."""
    now = 36_077.123
    state = SchedulerState(lambda: now)
    store = MemoryStore(boot_ms=1)
    grants = GrantLoop(store, state, claim_timeout_s=5.0, resume_grace_s=3.0)
    store.subscribe(state.apply)
    await store.register(register_message("free"))
    await store.register(register_message("busy", slots=slot_reports(CLEANING)))
    search = state.next_grant
    granted = asyncio.Event()
    state.listeners.append(lambda _: granted.set() if state.grants else None)

    def search_slowly(pool: str) -> tuple[Ticket, Candidate] | None:
        nonlocal now
        found = search(pool)
        now += 0.001
        return found

    state.next_grant = search_slowly
    request = lease_pb2.AcquireLeaseRequest(request_id="r", kind=AUDIO, avoided_worker_ids=["free"])
    request.avoided_duration.FromMicroseconds(500)
    assert isinstance(await store.enqueue(request, "owner"), Ticket)
    running = asyncio.create_task(grants.run())
    async with asyncio.timeout(WITHIN_S):
        await granted.wait()
    running.cancel()


async def queued(store: MemoryStore, name: str, order: int | None = None) -> Ticket:
    request = lease_pb2.AcquireLeaseRequest(request_id=name, kind=AUDIO)
    ticket = await store.enqueue(request, "owner", order)
    assert isinstance(ticket, Ticket)
    return ticket
