"""What every lease store must do. Another engine joins by an entry in STORES."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import TypeVar

import pytest
from scheduler_world import AUDIO, FREE, OCCUPIED, register_message, slot_reports

from duplane.scheduler.store import open_store
from duplane.scheduler.store.base import (
    Change,
    End,
    Grant,
    GrantGone,
    GrantPut,
    LeaseStore,
    Ticket,
    TicketGone,
    TicketPut,
    Wish,
    Worker,
    WorkerGone,
    WorkerPut,
)
from duplane.scheduler.store.memory import MemoryStore

BOOT_MS = 1_700_000_000_000
STORES: dict[str, Callable[[], LeaseStore]] = {"memory": lambda: MemoryStore(BOOT_MS)}
LONG_S = 60.0
OneChange = TypeVar("OneChange", bound=Change)
_numbers = itertools.count()


class Told:
    """Everything a subscriber was told."""

    def __init__(self, store: LeaseStore) -> None:
        self.changes: list[Change] = []
        self._has_more = asyncio.Event()
        store.subscribe(self._take)

    def _take(self, change: Change) -> None:
        self.changes.append(change)
        self._has_more.set()

    def of(self, kind: type[OneChange]) -> list[OneChange]:
        return [change for change in self.changes if isinstance(change, kind)]

    async def one(self, kind: type[OneChange], count: int = 1) -> OneChange:
        """Wait for the `count`-th change of a kind."""
        async with asyncio.timeout(5):
            while len(found := self.of(kind)) < count:
                self._has_more.clear()
                await self._has_more.wait()
        return found[count - 1]


@pytest.fixture(params=STORES)
async def store(request: pytest.FixtureRequest) -> AsyncGenerator[LeaseStore]:
    opened = STORES[request.param]()
    running = asyncio.create_task(opened.run())
    yield opened
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


@pytest.fixture
def told(store: LeaseStore) -> Told:
    return Told(store)


def wish(request_id: str = "", pool: str = "") -> Wish:
    number = next(_numbers)
    return Wish(request_id or f"request-{number}", f"owner-{number}", AUDIO, pool)


async def registered(store: LeaseStore, worker_id: str = "w", slot_count: int = 1) -> Worker:
    worker = await store.register(register_message(worker_id, slot_count))
    assert worker
    return worker


async def queued(store: LeaseStore, want: Wish | None = None, order: int | None = None) -> Ticket:
    ticket = await store.enqueue(want or wish(), order)
    assert isinstance(ticket, Ticket)
    return ticket


def proposal(ticket: Ticket, worker: Worker, slot: int = 0) -> Grant:
    return Grant(
        token=0,
        lease_id=f"lease-{next(_numbers)}",
        worker_id=worker.worker_id,
        worker_epoch=worker.epoch,
        slot=slot,
        kind=AUDIO,
        ticket=ticket,
    )


async def granted(
    store: LeaseStore, worker: Worker, slot: int = 0, claim_timeout_s: float = LONG_S
) -> Grant:
    grant = await store.try_grant(proposal(await queued(store), worker, slot), claim_timeout_s)
    assert grant
    return grant


async def test_numbers_rise_with_every_change(store: LeaseStore, told: Told) -> None:
    worker = await registered(store, slot_count=2)
    first, second = await granted(store, worker, 0), await granted(store, worker, 1)
    await store.release(first)
    again = await granted(store, worker, 0)
    assert worker.epoch < first.token < second.token < again.token
    revisions = [change.revision for change in told.changes]
    assert revisions == sorted(revisions)


async def test_grant_takes_ticket_and_slot_in_one_step(store: LeaseStore, told: Told) -> None:
    worker, ticket = await registered(store), await queued(store)
    grant = await store.try_grant(proposal(ticket, worker), LONG_S)
    assert grant
    assert grant.ticket == ticket
    assert (await told.one(GrantPut)).grant == grant
    gone = await told.one(TicketGone)
    assert (gone.ticket, gone.is_granted) == (ticket, True)
    assert not await store.cancel(ticket.order)


async def test_granted_slot_is_refused(store: LeaseStore) -> None:
    worker = await registered(store)
    await granted(store, worker)
    late = await queued(store)
    assert await store.try_grant(proposal(late, worker), LONG_S) is None
    assert await store.cancel(late.order), "a refused grant has taken the ticket"


async def test_ticket_is_granted_once(store: LeaseStore) -> None:
    worker, ticket = await registered(store, slot_count=2), await queued(store)
    assert await store.try_grant(proposal(ticket, worker, 0), LONG_S)
    assert await store.try_grant(proposal(ticket, worker, 1), LONG_S) is None


async def test_ticket_that_was_taken_over_is_not_granted_to_the_former(store: LeaseStore) -> None:
    worker, former = await registered(store), await queued(store, wish("r"))
    later = await queued(store, wish("r"))
    assert await store.try_grant(proposal(former, worker), LONG_S) is None
    assert await store.try_grant(proposal(later, worker), LONG_S)


async def test_former_registration_is_not_granted_from(store: LeaseStore) -> None:
    former, ticket = await registered(store), await queued(store)
    later = await registered(store)
    assert later.epoch > former.epoch
    assert await store.try_grant(proposal(ticket, former), LONG_S) is None
    assert await store.try_grant(proposal(ticket, later), LONG_S)


async def test_another_incarnation_does_not_replace_a_registration(store: LeaseStore) -> None:
    worker = await registered(store)
    assert await store.register(register_message(incarnation="another")) is None
    assert await store.unregister("w", worker.epoch)
    assert await store.register(register_message(incarnation="another"))


async def test_grants_go_with_their_registration(store: LeaseStore, told: Told) -> None:
    worker = await registered(store)
    grant = await granted(store, worker)
    assert await store.unregister("w", worker.epoch)
    gone = await told.one(GrantGone)
    assert (gone.grant, gone.end) == (grant, End.WORKER_GONE)
    assert (await told.one(WorkerGone)).worker == worker
    for verb in (store.claim, store.give_back, store.release):
        assert not await verb(grant)
    assert not await store.unregister("w", worker.epoch)


async def test_registering_again_ends_the_grants_of_before(store: LeaseStore, told: Told) -> None:
    grant = await granted(store, await registered(store))
    await registered(store)
    assert (await told.one(GrantGone)).grant == grant
    assert not await store.claim(grant)


async def test_former_stream_cannot_end_or_change_a_later_registration(store: LeaseStore) -> None:
    former = await registered(store)
    later = await registered(store)
    assert not await store.unregister("w", former.epoch)
    assert not await store.report(replace(former, is_draining=True))
    assert await store.report(replace(later, is_draining=True))


async def test_report_replaces_what_the_worker_says(store: LeaseStore, told: Told) -> None:
    worker = await registered(store)
    changed = replace(worker, register=register_message(slots=slot_reports(OCCUPIED)))
    assert await store.report(changed)
    assert (await told.one(WorkerPut, 2)).worker == changed


async def test_wish_of_the_operator_outlives_reports(store: LeaseStore, told: Told) -> None:
    worker = await registered(store)
    assert await store.drain("w")
    assert not await store.drain("nobody")
    assert await store.report(worker)
    assert (await told.one(WorkerPut, 3)).worker.is_drain_wanted


async def test_numbers_lift_above_what_workers_have_seen(store: LeaseStore) -> None:
    seen = 1 << 61
    slots = slot_reports(FREE)
    slots[0].fencing_number = seen
    worker = await store.register(register_message(slots=slots))
    assert worker
    assert worker.epoch > seen
    slots[0].fencing_number = worker.epoch + 1000
    assert await store.report(replace(worker, register=register_message(slots=slots)))
    assert (await granted(store, worker)).token > worker.epoch + 1000


async def test_tickets_are_ordered_as_they_came(store: LeaseStore) -> None:
    orders = [(await queued(store)).order for _ in range(3)]
    assert orders == sorted(set(orders))


async def test_ticket_id_carries_the_order(store: LeaseStore) -> None:
    ticket = await queued(store)
    assert ticket.ticket_id == f"q_{ticket.order:016x}"


async def test_repeated_wish_keeps_its_order_and_changes_its_owner(
    store: LeaseStore, told: Told
) -> None:
    first, repeated = await queued(store, wish("r")), wish("r")
    second = await queued(store, repeated)
    assert second == Ticket(first.order, repeated)
    assert (await told.one(TicketPut, 2)).ticket == second
    assert not await store.cancel(first.order, first.wish.owner)
    assert await store.cancel(first.order, second.wish.owner)


async def test_wish_takes_over_the_ticket_that_waits_at_its_order(store: LeaseStore) -> None:
    first, other = await queued(store), wish()
    assert await queued(store, other, first.order) == Ticket(first.order, other)
    again = await queued(store, first.wish)
    assert again.order > first.order, "the former wish still has a place"


async def test_old_place_is_taken_again(store: LeaseStore) -> None:
    first, second = await queued(store), await queued(store)
    assert await store.cancel(first.order)
    assert (await queued(store, order=first.order)).order == first.order < second.order


async def test_place_that_was_never_given_is_not_taken(store: LeaseStore) -> None:
    last = await queued(store)
    assert last.order < (await queued(store, order=last.order + (1 << 40))).order
    assert (await queued(store)).order < last.order + (1 << 40)


async def test_repeated_wish_gets_the_grant_it_has(store: LeaseStore) -> None:
    worker, ticket = await registered(store), await queued(store, wish("r"))
    grant = await store.try_grant(proposal(ticket, worker), LONG_S)
    assert grant
    assert await store.enqueue(wish("r")) == grant
    assert await store.release(grant)
    assert isinstance(await store.enqueue(wish("r")), Ticket)


async def test_unclaimed_grant_expires_but_not_early(store: LeaseStore, told: Told) -> None:
    worker, before = await registered(store, slot_count=2), time.monotonic()
    first = await granted(store, worker, 0, claim_timeout_s=0.15)
    await granted(store, worker, 1)
    gone = await told.one(GrantGone)
    assert (gone.grant, gone.end) == (first, End.EXPIRED)
    assert time.monotonic() - before >= 0.15
    assert len(told.of(GrantGone)) == 1


async def test_claimed_grant_never_expires(store: LeaseStore, told: Told) -> None:
    worker = await registered(store, slot_count=2)
    claimed = await granted(store, worker, 0, claim_timeout_s=0.05)
    assert await store.claim(claimed)
    later = await granted(store, worker, 1, claim_timeout_s=0.1)
    assert (await told.one(GrantGone)).grant == later
    assert await store.release(claimed)


async def test_giving_back_ends_an_unclaimed_grant(store: LeaseStore, told: Told) -> None:
    grant = await granted(store, await registered(store))
    assert await store.give_back(grant)
    gone = await told.one(GrantGone)
    assert (gone.grant, gone.end) == (grant, End.RETURNED)
    assert not await store.give_back(grant)


async def test_giving_back_a_claimed_grant_waits_for_its_worker(
    store: LeaseStore, told: Told
) -> None:
    worker = await registered(store)
    grant = await granted(store, worker)
    assert await store.claim(grant)
    assert await store.give_back(grant)
    assert (await told.one(GrantPut, 3)).grant.is_revoked
    assert await store.try_grant(proposal(await queued(store), worker), LONG_S) is None
    assert await store.release(grant)
    assert (await told.one(GrantGone)).end is End.RELEASED


async def test_old_token_moves_nothing(store: LeaseStore) -> None:
    worker = await registered(store)
    old = await granted(store, worker)
    await store.release(old)
    new = await granted(store, worker)
    for verb in (store.claim, store.give_back, store.release):
        assert not await verb(old)
    assert await store.claim(new)


async def test_adopted_lease_holds_its_slot(store: LeaseStore, told: Told) -> None:
    worker = await registered(store)
    held = replace(proposal(await queued(store), worker), ticket=None, token=7, is_claimed=True)
    assert await store.adopt(held)
    assert not await store.adopt(replace(held, lease_id="another"))
    assert not await store.adopt(replace(held, worker_epoch=1))
    assert await store.try_grant(proposal(await queued(store), worker), LONG_S) is None
    assert (await told.one(GrantPut)).grant == held
    assert await store.release(held)


async def test_late_subscriber_is_told_what_is_there(store: LeaseStore) -> None:
    worker = await registered(store)
    grant, ticket = await granted(store, worker), await queued(store)
    late = Told(store)
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


@pytest.mark.parametrize("url", ["etcd:", "etcd://h:2379", "memory:x", "redis:", "", "memory"])
def test_store_that_does_not_exist_is_refused_by_name(url: str) -> None:
    with pytest.raises(ValueError, match=r"^store: "):
        open_store(url, BOOT_MS)
