"""The scheduler's metrics of slots, queue, leases, refusals and the store."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.monitoring.metrics import Scrape, read
from support.scheduler.scheduler_harness import (
    BROKEN,
    CLEANING,
    FREE,
    SchedulerHarness,
    slot_reports,
)

from duplane.fabric.errors import FabricError, Reason
from duplane.scheduler.metrics import LEASE_EVENTS
from duplane.scheduler.slot_counts import SLOT_STATES
from duplane.scheduler.store.base import LeaseStore
from duplane.scheduler.store.measured import OPERATIONS


async def until(harness: SchedulerHarness, is_true: Callable[[Scrape], bool]) -> Scrape:
    """Wait until the metrics satisfy a condition."""
    operator = await harness.operator()
    await operator.until(lambda _: is_true(read(harness.metrics)))
    return read(harness.metrics)


def slots(scrape: Scrape, pool: str = "") -> dict[str, float]:
    states = {
        state: scrape.value("duplane_slots", role="scheduler", pool=pool, state=state)
        for state in SLOT_STATES
    }
    return {state: count for state, count in states.items() if count}


def lease_events(scrape: Scrape) -> dict[str, float]:
    name = "duplane_lease_events_total"
    events = {event: scrape.value(name, event=event) for event in LEASE_EVENTS}
    return {event: count for event, count in events.items() if count}


async def test_slot_is_counted_by_its_state_from_grant_to_release() -> None:
    async with SchedulerHarness.running(claim_timeout_s=60.0) as harness:
        worker = await harness.worker(slots=slot_reports(FREE, CLEANING, BROKEN))
        assert slots(read(harness.metrics)) == {"free": 1, "cleaning": 1, "broken": 1}
        granted = await (await harness.caller()).granted()
        assert slots(read(harness.metrics)) == {"granted": 1, "cleaning": 1, "broken": 1}
        claims = await worker.claim(granted)
        await until(harness, lambda seen: slots(seen).get("occupied") == 1)
        await worker.finish(claims.slot)
        seen = await until(harness, lambda seen: slots(seen).get("free") == 1)
        assert lease_events(seen) == {"granted": 1, "claimed": 1, "released": 1}
        assert seen.value("duplane_workers", state="ready") == 1


async def test_free_slots_of_a_draining_worker_are_unavailable() -> None:
    async with SchedulerHarness.running() as harness:
        await harness.worker(slot_count=2, pool="blue")
        assert slots(read(harness.metrics), "blue") == {"free": 2}
        operator = await harness.operator()
        await operator.drain("w")
        seen = await until(harness, lambda seen: slots(seen, "blue") == {"unavailable": 2})
        assert seen.value("duplane_workers", state="draining") == 1
        assert seen.value("duplane_workers", state="ready") == 0


async def test_queue_is_counted_while_it_waits_and_timed_when_it_ends() -> None:
    async with SchedulerHarness.running() as harness:
        first, second = await harness.queue(2)
        seen = read(harness.metrics)
        assert seen.value("duplane_queue_tickets", pool="", kind="audio_duplex") == 2
        assert seen.value("duplane_queue_oldest_wait_seconds", pool="") > 0
        await second.vanish()
        await until(harness, lambda seen: seen.total("duplane_queue_tickets") == 1)
        await harness.worker()
        await first.granted()
        seen = await until(harness, lambda seen: seen.total("duplane_queue_tickets") == 0)
        waits = "duplane_queue_wait_seconds_count"
        assert seen.value(waits, kind="audio_duplex", outcome="granted") == 1
        assert seen.value(waits, kind="audio_duplex", outcome="left") == 1
        assert seen.value("duplane_queue_oldest_wait_seconds", pool="") == 0


async def test_invented_pools_do_not_become_labels() -> None:
    async with SchedulerHarness.running() as harness:
        before = len(read(harness.metrics))
        for number in range(20):
            caller = await harness.caller(pool=f"invented-{number}")
            await caller.stands(1)
        seen = read(harness.metrics)
        assert seen.value("duplane_queue_tickets", pool="other", kind="audio_duplex") == 20
        assert len(seen) == before + 2


async def test_refusals_are_counted_by_reason() -> None:
    async with SchedulerHarness.running(ticket_limit=1) as harness:
        await harness.queue(1)
        assert (await (await harness.caller()).refused()).reason is Reason.QUEUE_FULL
        name = "duplane_lease_requests_refused_total"
        assert read(harness.metrics).value(name, reason="QUEUE_FULL") == 1


async def test_operations_of_the_store_are_counted_and_timed() -> None:
    async with SchedulerHarness.running() as harness:
        await harness.worker()
        await (await harness.caller()).granted()
        seen = read(harness.metrics)
        counts, name = "duplane_store_operations_total", "duplane_store_operation_duration_seconds"
        for operation in ("register", "enqueue"):
            assert seen.value(counts, operation=operation, outcome="done") == 1
            assert seen.value(f"{name}_count", operation=operation) == 1
            assert seen.value(f"{name}_sum", operation=operation) > 0
        operator = await harness.operator()
        with pytest.raises(FabricError):
            await operator.drain("unknown")
        assert read(harness.metrics).value(counts, operation="drain", outcome="void") == 1


def test_every_operation_of_the_store_is_measured() -> None:
    listening = {"subscribe", "watch_keys", "watch_contact", "watch_refusal"}
    others = {"has_kept_queue", "share_keys", "until_read", "until_whole", "run", "leave"}
    tickets = {"ticket_key", "may_be_former"}
    assert set(OPERATIONS) == LeaseStore.__abstractmethods__ - listening - others - tickets
