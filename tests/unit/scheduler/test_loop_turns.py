"""The scheduler does a bounded amount of work before it lets other tasks run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
from support.scheduler.scheduler_harness import AUDIO, register_message

from duplane.fabric.v1 import admin_pb2, lease_pb2, registry_pb2
from duplane.scheduler import watch
from duplane.scheduler.policy import forecast
from duplane.scheduler.policy.fair_queue import QueueEntry
from duplane.scheduler.policy.forecast import Demand, Supply
from duplane.scheduler.policy.hold_times import HoldTimes
from duplane.scheduler.rpc.admin import AdminServicer
from duplane.scheduler.slot_counts import SlotCounts, slot_state, worker_state
from duplane.scheduler.state import SchedulerState
from duplane.scheduler.store.base import Offer, Ticket, Worker
from duplane.scheduler.store.memory import MemoryStore
from duplane.scheduler.watch import PORTION, SNAPSHOT_LENGTH, Watch

TICKET_COUNT = 3 * SNAPSHOT_LENGTH


class LocalScheduler:
    """Store and state of one scheduler."""

    def __init__(self) -> None:
        self.store = MemoryStore(1_700_000_000_000)
        self.state = SchedulerState(time.monotonic)
        self.watch = Watch(self.state, ticket_limit=10)
        self.store.subscribe(self.state.apply)

    async def enqueue(self, name: str, **fields: object) -> Ticket:
        request = lease_pb2.AcquireLeaseRequest(request_id=name, kind=AUDIO, **fields)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]  # any field
        ticket = await self.store.enqueue(request, "owner")
        assert isinstance(ticket, Ticket)
        return ticket


class Turns:
    """Counts the calls of a function in each pass of the event loop."""

    def __init__(self, patch: pytest.MonkeyPatch, module: object, name: str) -> None:
        self.longest = self.total = self._in_turn = 0
        self._counted = getattr(module, name)
        self._is_running = True
        patch.setattr(module, name, self._call)
        asyncio.get_running_loop().call_soon(self._turn)

    def _call(self, *arguments: object) -> object:
        self._in_turn += 1
        self.total += 1
        self.longest = max(self.longest, self._in_turn)
        return self._counted(*arguments)

    def _turn(self) -> None:
        self._in_turn = 0
        if self._is_running:
            asyncio.get_running_loop().call_soon(self._turn)

    def end(self) -> None:
        self._is_running = False


@pytest.fixture
async def full(monkeypatch: pytest.MonkeyPatch) -> LocalScheduler:
    scheduler = LocalScheduler()
    for number in range(TICKET_COUNT):
        await scheduler.enqueue(f"r{number}")
    return scheduler


async def test_snapshot_lets_other_tasks_run_and_comes_in_parts(
    full: LocalScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = Turns(monkeypatch, watch, "ticket_status")
    parts = [part async for part in full.watch.snapshot()]
    turns.end()
    assert [len(part.tickets) for part in parts] == [SNAPSHOT_LENGTH] * 3
    assert [part.has_more for part in parts] == [True, True, False]
    assert turns.total == TICKET_COUNT
    assert turns.longest <= PORTION


async def test_list_lets_other_tasks_run_and_leaves_out_what_ends_meanwhile(
    full: LocalScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = Turns(monkeypatch, watch, "ticket_status")
    last = max(full.state.tickets)
    asyncio.get_running_loop().call_soon(lambda: asyncio.ensure_future(full.store.cancel(last)))
    admin = AdminServicer(full.store, full.state, full.watch)
    count = 0
    page = admin_pb2.ListTicketsResponse()
    while not count or page.next_page_token:
        request = admin_pb2.ListTicketsRequest(page_token=page.next_page_token)
        page = await admin.ListTickets(request, cast(Any, None))
        count += len(page.tickets)
    turns.end()
    assert count == TICKET_COUNT - 1
    assert turns.longest <= PORTION


async def test_positions_of_many_queues_are_published_in_turn() -> None:
    scheduler = LocalScheduler()
    published = list[QueueEntry]()
    await scheduler.store.register(register_message())
    tickets = [
        [await scheduler.enqueue(f"r{queue}.{place}", pool=f"p{queue}") for place in range(3)]
        for queue in range(20)
    ]
    scheduler.state.position_listeners.append(published.extend)
    for first, *_ in tickets:
        await scheduler.store.cancel(first.order)
    counts: list[int] = []
    has_more = True
    while has_more:
        before = len(published)
        has_more = scheduler.state.publish_positions(32)
        counts.append(len(published) - before)
    assert max(counts) <= 2 * 4
    moved = {entry.ticket.order for entry in published}
    assert moved == {ticket.order for _, *behind in tickets for ticket in behind}


def test_forecast_of_many_demands_simulates_a_bounded_number_of_portions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    starts: list[int] = []
    start = forecast._start

    def counted(heaps: Sequence[list[tuple[float, int]]], count: int, *rest: float) -> object:
        starts.append(count)
        return start(heaps, count, *rest)

    monkeypatch.setattr(forecast, "_start", counted)
    demands = [
        Demand(AUDIO, forecast.SortedList(range(queue, 100_000, 100)), [0], line=queue)
        for queue in range(100)
    ]
    waits = forecast.forecast(demands, [Supply(8, {})], HoldTimes(), 0.0)
    assert sum(starts) == 100_000
    assert len(starts) <= 2 * 256
    assert all(one.wait_s(999) for one in waits)


async def test_forecast_is_bounded_with_many_label_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = LocalScheduler()
    outlook = Supply.outlook
    outlooks = list[Supply]()

    def counted(supply: Supply, times: HoldTimes, now: float) -> object:
        outlooks.append(supply)
        return outlook(supply, times, now)

    monkeypatch.setattr(Supply, "outlook", counted)
    for number in range(100):
        labels = {"host": str(number), "zone": "a"}
        await scheduler.store.register(register_message(f"w{number}", labels=labels))
    tickets = [
        await scheduler.enqueue(f"r{number}", needs={"host": str(number)}) for number in (7, 8)
    ]
    anywhere = [await scheduler.enqueue(f"a{number}", needs={"zone": "a"}) for number in range(400)]
    elsewhere = await scheduler.enqueue("nowhere", needs={"host": "unknown"})
    assert [scheduler.state.wait_s(ticket) for ticket in tickets] == [0, 0]
    assert len(outlooks) == 2
    assert scheduler.state.wait_s(anywhere[0]) == 0
    # The last of 400 tickets waits for three sessions on each of 100 workers. The forecast is right
    # although it simulates only a part of these workers.
    assert scheduler.state.wait_s(anywhere[-1]) == pytest.approx(360, rel=0.1)
    assert len(outlooks) <= 2 + 32
    assert scheduler.state.wait_s(elsewhere) is None


def counted_anew(state: SchedulerState) -> Iterator[tuple[str, str]]:
    for worker in state.workers.values():
        for slot in worker.slots:
            grant = state.grant_of(worker.worker_id, slot.slot)
            yield worker.register.pool, slot_state(worker, slot, grant)


async def test_counts_of_slots_follow_every_change() -> None:
    scheduler = LocalScheduler()
    counts = SlotCounts(scheduler.state)

    def check() -> None:
        found = {key: count for key, count in counts.by_state(counts.pools) if count}
        expected: dict[tuple[str, str], int] = {}
        for key in counted_anew(scheduler.state):
            expected[key] = expected.get(key, 0) + 1
        assert found == expected
        states = [worker_state(worker) for worker in scheduler.state.workers.values()]
        states += ["lost"] * len(scheduler.state.lost_workers)
        assert {state: count for state, count in counts.workers_by_state() if count} == {
            state: states.count(state) for state in states
        }

    first = await attached(scheduler, "first", "a")
    second = await attached(scheduler, "second", "b")
    check()
    ticket = await scheduler.enqueue("r")
    claims = lease_pb2.LeaseClaims(lease_id="l", worker_id="first", worker_epoch=first.epoch)
    grant = await scheduler.store.try_grant(ticket, Offer(claims, 60))
    assert grant
    check()
    await scheduler.store.claim(grant)
    check()
    broken = registry_pb2.SlotReport(slot=1, state=registry_pb2.SLOT_STATE_BROKEN)
    slots = (second.slots[0], broken)
    await scheduler.store.report(replace(second, slots=slots, is_draining=True))
    check()
    await scheduler.store.unregister("second", second.epoch)
    check()
    await scheduler.store.release(grant)
    await scheduler.store.unregister("second", second.epoch)
    check()
    assert set(counts.pools) == {"a"}


async def attached(scheduler: LocalScheduler, name: str, pool: str) -> Worker:
    worker = await scheduler.store.register(register_message(name, 2, pool=pool))
    assert worker
    return worker
