"""The contract of every lease store: the effects of each operation."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest
from support.scheduler.scheduler_harness import FREE, OCCUPIED, register_message, slot_reports
from support.scheduler.store_operations import (
    LONG_S,
    Changes,
    claims_for,
    granted,
    lease_request,
    queued,
    registered,
)

from duplane.fabric.v1 import lease_pb2
from duplane.scheduler.store.base import (
    Grant,
    GrantEnd,
    GrantGone,
    GrantPut,
    LeaseStore,
    Offer,
    Ticket,
    TicketGone,
    TicketPut,
    WorkerGone,
    WorkerPut,
)
from duplane.scheduler.store.opening import open_store

BOOT_MS = 1_700_000_000_000


@pytest.fixture
async def store(store_url: str) -> AsyncGenerator[LeaseStore]:
    opened = open_store(store_url, BOOT_MS)
    running = asyncio.create_task(opened.run())
    yield opened
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


@pytest.fixture
def changes(store: LeaseStore) -> Changes:
    return Changes(store)


async def test_numbers_rise_with_every_change(store: LeaseStore, changes: Changes) -> None:
    worker = await registered(store, slot_count=2)
    first, second = await granted(store, worker, 0), await granted(store, worker, 1)
    await store.release(first)
    again = await granted(store, worker, 0)
    assert (
        worker.epoch
        < first.claims.fencing_number
        < second.claims.fencing_number
        < again.claims.fencing_number
    )
    revisions = [change.revision for change in changes.received]
    assert revisions == sorted(revisions)


async def test_grant_takes_ticket_and_slot_in_one_step(store: LeaseStore, changes: Changes) -> None:
    worker, ticket = await registered(store), await queued(store)
    grant = await store.try_grant(ticket, Offer(claims_for(worker), LONG_S))
    assert grant
    assert grant.ticket == ticket
    assert (await changes.one(GrantPut)).grant == grant
    gone = await changes.one(TicketGone)
    assert (gone.ticket, gone.is_granted) == (ticket, True)
    assert not await store.cancel(ticket.order)


async def test_granted_slot_is_refused(store: LeaseStore) -> None:
    worker = await registered(store)
    await granted(store, worker)
    late = await queued(store)
    assert await store.try_grant(late, Offer(claims_for(worker), LONG_S)) is None
    assert await store.cancel(late.order), "a refused grant has taken the ticket"


async def test_ticket_is_granted_once(store: LeaseStore) -> None:
    worker, ticket = await registered(store, slot_count=2), await queued(store)
    assert await store.try_grant(ticket, Offer(claims_for(worker, 0), LONG_S))
    assert await store.try_grant(ticket, Offer(claims_for(worker, 1), LONG_S)) is None


async def test_ticket_that_was_taken_over_is_not_granted_to_the_former(store: LeaseStore) -> None:
    worker, former = await registered(store), await queued(store, "r")
    later = await queued(store, "r")
    assert await store.try_grant(former, Offer(claims_for(worker), LONG_S)) is None
    assert await store.try_grant(later, Offer(claims_for(worker), LONG_S))


async def test_former_registration_is_not_granted_from(store: LeaseStore) -> None:
    former, ticket = await registered(store), await queued(store)
    later = await registered(store)
    assert later.epoch > former.epoch
    assert await store.try_grant(ticket, Offer(claims_for(former), LONG_S)) is None
    assert await store.try_grant(ticket, Offer(claims_for(later), LONG_S))


async def test_another_incarnation_does_not_replace_a_registration(store: LeaseStore) -> None:
    worker = await registered(store)
    assert await store.register(register_message(incarnation="another")) is None
    assert await store.unregister("w", worker.epoch)
    assert await store.register(register_message(incarnation="another"))


async def test_late_registration_does_not_replace_a_later_one(store: LeaseStore) -> None:
    later = await store.register(register_message(stream_number=2))
    assert later
    assert await store.register(register_message(stream_number=1)) is None
    assert await store.drain("w"), "the later one has ended"
    again = await store.register(register_message(stream_number=2))
    assert again
    assert again.epoch > later.epoch
    assert await store.register(register_message()), "without a number the last one counts"


async def test_grants_go_with_their_registration(store: LeaseStore, changes: Changes) -> None:
    worker = await registered(store)
    grant = await granted(store, worker)
    assert await store.unregister("w", worker.epoch)
    gone = await changes.one(GrantGone)
    assert (gone.grant, gone.end) == (grant, GrantEnd.WORKER_GONE)
    assert (await changes.one(WorkerGone)).worker == worker
    for verb in (store.claim, store.give_back, store.release):
        assert not await verb(grant)
    assert not await store.unregister("w", worker.epoch)


async def test_registering_again_ends_the_grants_of_before(
    store: LeaseStore, changes: Changes
) -> None:
    grant = await granted(store, await registered(store))
    await registered(store)
    assert (await changes.one(GrantGone)).grant == grant
    assert not await store.claim(grant)


async def test_former_stream_cannot_end_or_change_a_later_registration(store: LeaseStore) -> None:
    former = await registered(store)
    later = await registered(store)
    assert not await store.unregister("w", former.epoch)
    assert not await store.report(replace(former, is_draining=True))
    assert await store.report(replace(later, is_draining=True))


async def test_report_replaces_what_the_worker_says(store: LeaseStore, changes: Changes) -> None:
    worker = await registered(store)
    changed = replace(worker, slots=tuple(slot_reports(OCCUPIED)))
    assert await store.report(changed)
    assert (await changes.one(WorkerPut, 2)).worker == changed


async def test_drain_request_of_an_operator_outlives_reports(
    store: LeaseStore, changes: Changes
) -> None:
    worker = await registered(store)
    assert await store.drain("w")
    assert not await store.drain("nobody")
    assert await store.report(replace(worker, slots=tuple(slot_reports(OCCUPIED))))
    assert (await changes.one(WorkerPut, 3)).worker.is_drain_requested


async def test_unreachable_worker_stays_marked_until_it_is_cleared(
    store: LeaseStore, changes: Changes
) -> None:
    worker = await registered(store)
    assert await store.set_unreachable("w", worker.epoch, is_unreachable=True)
    assert await store.report(replace(worker, slots=tuple(slot_reports(OCCUPIED))))
    assert (await changes.one(WorkerPut, 3)).worker.is_unreachable
    assert not await store.set_unreachable("w", worker.epoch - 1, is_unreachable=False)
    assert await store.set_unreachable("w", worker.epoch, is_unreachable=False)
    last = (await changes.one(WorkerPut, 4)).worker
    assert not last.is_unreachable
    assert last.takes_sessions


async def test_revision_rises_above_the_numbers_that_workers_have_seen(store: LeaseStore) -> None:
    seen = 1 << 61
    slots = slot_reports(FREE)
    slots[0].fencing_number = seen
    worker = await store.register(register_message(slots=slots))
    assert worker
    assert worker.epoch > seen
    slots[0].fencing_number = worker.epoch + 1000
    assert await store.report(replace(worker, slots=tuple(slots)))
    assert (await granted(store, worker)).claims.fencing_number > worker.epoch + 1000


async def test_tickets_are_ordered_by_their_arrival(store: LeaseStore) -> None:
    orders = [(await queued(store)).order for _ in range(3)]
    assert orders == sorted(set(orders))


async def test_ticket_id_carries_the_order(store: LeaseStore) -> None:
    ticket = await queued(store)
    assert ticket.ticket_id == f"q_{ticket.order:016x}"


async def test_repeated_request_keeps_its_order_and_changes_its_owner(
    store: LeaseStore, changes: Changes
) -> None:
    first = await queued(store, "r")
    second = await queued(store, "r")
    assert (second.order, second.request) == (first.order, first.request)
    assert second.owner != first.owner
    assert (await changes.one(TicketPut, 2)).ticket == second
    assert not await store.cancel(first.order, first.owner)
    assert await store.cancel(first.order, second.owner)


async def test_request_takes_over_the_ticket_that_waits_at_its_order(store: LeaseStore) -> None:
    first = await queued(store)
    second = await queued(store, "other", first.order)
    assert (second.order, second.request.request_id) == (first.order, "other")
    again = await queued(store, first.request.request_id)
    assert again.order > first.order, "the former request still has a ticket"


async def test_old_order_can_be_taken_again(store: LeaseStore) -> None:
    first, second = await queued(store), await queued(store)
    assert await store.cancel(first.order)
    assert (await queued(store, order=first.order)).order == first.order < second.order


async def test_order_that_was_never_issued_is_not_used(store: LeaseStore) -> None:
    last = await queued(store)
    assert last.order < (await queued(store, order=last.order + (1 << 40))).order
    assert (await queued(store)).order < last.order + (1 << 40)


async def test_repeated_request_gets_the_grant_it_has(store: LeaseStore) -> None:
    worker, ticket = await registered(store), await queued(store, "r")
    grant = await store.try_grant(ticket, Offer(claims_for(worker), LONG_S))
    assert grant
    assert await store.enqueue(lease_request("r"), "another") == grant
    assert await store.release(grant)
    assert isinstance(await store.enqueue(lease_request("r"), "another"), Ticket)


async def test_request_that_nobody_is_ahead_of_is_granted_at_once(
    store: LeaseStore, changes: Changes
) -> None:
    worker = await registered(store)
    request, offer = lease_request("r"), Offer(claims_for(worker), LONG_S)
    grant = await store.enqueue(request, "owner", None, offer)
    assert isinstance(grant, Grant)
    assert grant.ticket == Ticket(grant.claims.fencing_number, "owner", request)
    assert (await changes.one(GrantPut)).grant == grant
    assert not changes.of(TicketPut)
    assert await store.enqueue(lease_request("r"), "another") == grant
    assert await store.claim(grant)


async def test_request_is_not_granted_at_once_while_another_waits(store: LeaseStore) -> None:
    worker, ahead = await registered(store), await queued(store)
    other = lease_request()
    other.pool = "other"
    assert isinstance(await store.enqueue(other, "owner"), Ticket)
    offer = Offer(claims_for(worker), LONG_S)
    behind = await store.enqueue(lease_request(), "owner", None, offer)
    assert isinstance(behind, Ticket)
    await store.cancel(ahead.order)
    await store.cancel(behind.order)
    assert isinstance(await store.enqueue(lease_request(), "owner", None, offer), Grant)


async def test_offer_that_cannot_be_granted_leaves_a_ticket(store: LeaseStore) -> None:
    former = await registered(store)
    worker = await registered(store)
    await granted(store, worker)
    for claims in (claims_for(worker), claims_for(former)):
        found = await store.enqueue(lease_request(), "owner", None, Offer(claims, LONG_S))
        assert isinstance(found, Ticket)
        await store.cancel(found.order)


async def test_request_that_returns_to_its_order_is_not_granted_at_once(store: LeaseStore) -> None:
    worker, former = await registered(store), await queued(store)
    await store.cancel(former.order)
    offer = Offer(claims_for(worker), LONG_S)
    found = await store.enqueue(lease_request(), "owner", former.order, offer)
    assert isinstance(found, Ticket)
    assert found.order == former.order


@pytest.mark.timing
async def test_unclaimed_grant_expires_but_not_early(store: LeaseStore, changes: Changes) -> None:
    worker, before = await registered(store, slot_count=2), time.monotonic()
    first = await granted(store, worker, 0, claim_timeout_s=0.15)
    await granted(store, worker, 1)
    gone = await changes.one(GrantGone)
    assert (gone.grant, gone.end) == (first, GrantEnd.EXPIRED)
    assert time.monotonic() - before >= 0.15
    assert len(changes.of(GrantGone)) == 1


@pytest.mark.timing
async def test_claimed_grant_never_expires(store: LeaseStore, changes: Changes) -> None:
    worker = await registered(store, slot_count=2)
    claimed = await granted(store, worker, 0, claim_timeout_s=1.0)
    assert await store.claim(claimed)
    later = await granted(store, worker, 1, claim_timeout_s=1.0)
    assert (await changes.one(GrantGone)).grant == later
    assert await store.release(claimed)


async def test_giving_back_ends_an_unclaimed_grant(store: LeaseStore, changes: Changes) -> None:
    grant = await granted(store, await registered(store))
    assert await store.give_back(grant)
    gone = await changes.one(GrantGone)
    assert (gone.grant, gone.end) == (grant, GrantEnd.RETURNED)
    assert not await store.give_back(grant)


async def test_giving_back_a_claimed_grant_waits_for_its_worker(
    store: LeaseStore, changes: Changes
) -> None:
    worker = await registered(store)
    grant = await granted(store, worker)
    assert await store.claim(grant)
    assert await store.give_back(grant)
    assert (await changes.one(GrantPut, 3)).grant.is_revoked
    assert await store.try_grant(await queued(store), Offer(claims_for(worker), LONG_S)) is None
    assert await store.release(grant)
    assert (await changes.one(GrantGone)).end is GrantEnd.RELEASED


async def test_operations_with_an_old_fencing_number_change_nothing(store: LeaseStore) -> None:
    worker = await registered(store)
    old = await granted(store, worker)
    await store.release(old)
    new = await granted(store, worker)
    for verb in (store.claim, store.give_back, store.release):
        assert not await verb(old)
    assert await store.claim(new)


async def test_adopted_lease_holds_its_slot(store: LeaseStore, changes: Changes) -> None:
    worker = await registered(store)
    claims = claims_for(worker)
    claims.fencing_number = 7
    held = Grant(claims, is_claimed=True)
    assert await store.adopt(held)
    assert not await store.adopt(Grant(claims_for(worker), is_claimed=True))
    former = lease_pb2.LeaseClaims()
    former.CopyFrom(claims)
    former.worker_epoch = 1
    assert not await store.adopt(Grant(former, is_claimed=True))
    assert await store.try_grant(await queued(store), Offer(claims_for(worker), LONG_S)) is None
    assert (await changes.one(GrantPut)).grant == held
    assert await store.release(held)


async def test_late_subscriber_receives_the_present_facts(store: LeaseStore) -> None:
    worker = await registered(store)
    grant, ticket = await granted(store, worker), await queued(store)
    late = Changes(store)
    assert (await late.one(WorkerPut)).worker == worker
    assert (await late.one(TicketPut)).ticket == ticket
    assert (await late.one(GrantPut)).grant == grant
    await store.release(grant)
    assert (await late.one(GrantGone)).grant == grant


async def test_embedded_store_starts_above_its_former_process() -> None:
    before = open_store("memory:", BOOT_MS)
    last = max([(await queued(before)).order for _ in range(100)])
    after = open_store("memory:", BOOT_MS + 1)
    old = await queued(after, order=last)
    assert old.order == last < (await queued(after)).order


@pytest.mark.parametrize("url", ["etcd:", "etcd://h", "memory:x", "redis:", "", "memory"])
def test_store_that_does_not_exist_is_refused_by_name(url: str) -> None:
    with pytest.raises(ValueError, match=r"^store: "):
        open_store(url, BOOT_MS)
