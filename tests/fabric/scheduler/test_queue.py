"""LeaseService over sockets: grants, positions, and calls that end, are repeated or return."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from support.scheduler.scheduler_harness import (
    AUDIO,
    BROKEN,
    CHAT,
    FREE,
    OCCUPIED,
    OMNI,
    SchedulerHarness,
    slot_reports,
)
from support.time_limits import WITHIN_S

from duplane.fabric.client import FabricClient
from duplane.fabric.errors import Reason
from duplane.fabric.v1 import lease_pb2, registry_pb2
from duplane.scheduler import revisions, wall_clock

pytestmark = pytest.mark.usefixtures("every_store")


@pytest.mark.timing
async def test_free_slot_is_granted_without_queueing() -> None:
    async with SchedulerHarness.running(claim_timeout_s=5.0) as harness:
        worker = await harness.worker(slot_count=2)
        caller = await harness.caller(session_id="s1")
        granted = await caller.granted()
        assert not caller.queued
        with pytest.raises(EOFError):
            await caller.read()
        assert granted.worker_address == "127.0.0.1:1"
        claims = await worker.claim(granted)
        assert claims.lease_id == granted.lease_id
        assert (claims.kind, claims.session_id) == (AUDIO, "s1")
        left = claims.expire_time.ToDatetime(tzinfo=UTC) - datetime.now(UTC)
        assert timedelta(0) < left <= timedelta(seconds=5)
        assert timedelta(0) < granted.claim_timeout.ToTimedelta() <= timedelta(seconds=5)


async def test_many_callers_are_served_in_order_and_positions_never_grow() -> None:
    async with SchedulerHarness.running() as harness:
        worker = await harness.worker(slot_count=2)
        running = [await (await harness.caller()).granted() for _ in range(2)]
        for granted in running:
            await worker.claim(granted)
        waiting = [await harness.caller() for _ in range(12)]
        # Each call has its own channel, so only the ticket ids show the order in which the calls
        # arrived.
        await asyncio.gather(*(caller.read() for caller in waiting))
        waiting.sort(key=lambda caller: caller.ticket_id)
        assert [caller.position for caller in waiting] == list(range(1, 13))
        for index, caller in enumerate(waiting):
            await worker.finish(index % 2)
            granted = await caller.granted()
            assert (await worker.claim(granted)).slot == index % 2
        for caller in waiting:
            positions = [queued.position for queued in caller.queued]
            assert positions == sorted(positions, reverse=True)
            assert all(queued.position <= queued.queue_length for queued in caller.queued)


async def test_fencing_numbers_of_a_slot_rise() -> None:
    async with SchedulerHarness.running() as harness:
        worker = await harness.worker()
        numbers: list[int] = []
        for _ in range(5):
            claims = await worker.claim(await (await harness.caller()).granted())
            numbers.append(claims.fencing_number)
            await worker.finish(0)
        assert numbers == sorted(set(numbers))


async def test_leaving_is_noticed_at_once_and_others_move_up() -> None:
    async with SchedulerHarness.running(queued_interval_s=60) as harness:
        first, second, third = await harness.queue(3)
        await first.vanish()
        await second.stands(1)
        await third.stands(2)
        await second.vanish()
        await third.stands(1)
        assert third.queued[-1].queue_length == 1


async def test_position_is_sent_again_at_the_interval() -> None:
    async with SchedulerHarness.running(queued_interval_s=0.02) as harness:
        caller = await harness.caller()
        for _ in range(3):
            await caller.read()
        assert [queued.position for queued in caller.queued] == [1, 1, 1]


@pytest.mark.timing
async def test_estimated_wait_is_absent_while_the_only_worker_is_silent() -> None:
    async with SchedulerHarness.running(report_interval_s=0.05) as harness:
        operator = await harness.operator()
        worker = await harness.worker(slot_count=2)
        await operator.until(lambda seen: "w" in seen.workers and seen.workers["w"].is_silent)
        caller = await harness.caller()
        await caller.stands(1)
        assert not caller.queued[0].HasField("estimated_wait")
        await worker.report()
        await caller.granted()


async def test_estimated_wait_is_absent_while_no_worker_is_known() -> None:
    async with SchedulerHarness.running(queued_interval_s=0.02) as harness:
        caller = await harness.caller()
        await caller.read()
        assert not caller.queued[0].HasField("estimated_wait")
        await harness.worker(slots=slot_reports(BROKEN, BROKEN))
        await caller.read()
        assert not caller.queued[-1].HasField("estimated_wait")


@pytest.mark.timing
async def test_unclaimed_grant_returns_and_its_late_claim_is_void() -> None:
    async with SchedulerHarness.running(claim_timeout_s=1.0) as harness:
        worker = await harness.worker()
        lost = await (await harness.caller()).granted()
        granted = await (await harness.caller()).granted()
        revoke = await worker.revoked()
        assert revoke.lease_id == lost.lease_id
        claims = await worker.claim(granted)
        assert claims.slot == revoke.slot
        assert claims.fencing_number > revoke.fencing_number


@pytest.mark.timing
async def test_claimed_grant_does_not_expire() -> None:
    async with SchedulerHarness.running(claim_timeout_s=1.0) as harness:
        operator, worker = await harness.operator(), await harness.worker(slot_count=2)
        granted = await (await harness.caller()).granted()
        await worker.claim(granted)
        # This grant expires, unlike the claimed lease.
        other = await (await harness.caller()).granted()
        assert (await worker.revoked()).lease_id == other.lease_id
        await operator.until(lambda seen: list(seen.leases) == [granted.lease_id])
        assert operator.leases[granted.lease_id].is_claimed


async def test_call_that_returns_its_grant_is_first_in_the_queue_again() -> None:
    async with SchedulerHarness.running() as harness:
        await harness.worker()
        granted = await (await harness.caller()).granted()
        second = await harness.caller()
        await second.stands(1)
        again = await harness.caller(ticket_id=granted.ticket_id)  # returns the first grant
        regranted = await again.granted()
        assert regranted.ticket_id == granted.ticket_id
        assert regranted.lease_id != granted.lease_id
        assert {queued.position for queued in second.queued} == {1}


async def test_call_cancelled_at_the_moment_of_its_grant_leaves_no_ticket_and_no_lease() -> None:
    async with SchedulerHarness.running() as harness:
        operator = await harness.operator()
        for _ in range(20):
            worker = await harness.worker()
            caller = await harness.caller()
            await caller.vanish()
            await worker.vanish()
            await operator.until(lambda seen: not seen.workers)
        waiting = [await harness.caller() for _ in range(20)]
        for caller in waiting:
            await caller.read()
        worker = await harness.worker(slot_count=20)
        for caller in waiting:
            await caller.vanish()  # the scheduler makes the other grants meanwhile
        await operator.until(lambda seen: not seen.tickets)
        for lease in list(operator.leases):
            await harness.release(lease)
        await operator.until(lambda seen: not seen.leases)
        for _ in range(20):
            await (await harness.caller()).granted()


async def test_repeated_call_takes_over_the_ticket() -> None:
    async with SchedulerHarness.running() as harness:
        first, behind = await harness.queue(2)
        second = await harness.caller(request_id=first.request.request_id)
        assert (await first.refused()).reason is Reason.SUPERSEDED
        await second.stands(1)
        assert second.ticket_id == first.ticket_id
        await harness.worker()
        await second.granted()
        await behind.stands(1)


async def test_repeated_call_gets_the_same_grant() -> None:
    async with SchedulerHarness.running() as harness:
        worker = await harness.worker(slot_count=2)
        first = await (await harness.caller(request_id="r")).granted()
        second = await (await harness.caller(request_id="r")).granted()
        assert (second.lease, second.lease_id) == (first.lease, first.lease_id)
        await worker.claim(second)
        await worker.finish(0)


async def test_request_id_of_another_kind_is_refused_and_the_first_call_continues() -> None:
    async with SchedulerHarness.running() as harness:
        first = await harness.caller(request_id="r")
        await first.stands(1)
        other = await harness.caller(CHAT, request_id="r")
        refused = await other.refused()
        assert (refused.reason, refused.field) == (Reason.INVALID_FIELD, "request_id")
        other = await harness.caller(pool="p", ticket_id=first.ticket_id)
        refused = await other.refused()
        assert (refused.reason, refused.field) == (Reason.INVALID_FIELD, "ticket_id")
        await harness.worker()
        await first.granted()


async def test_ticket_of_a_call_not_yet_missed_is_taken_over() -> None:
    async with SchedulerHarness.running() as harness:
        first, _ = await harness.queue(2)
        again = await harness.caller(ticket_id=first.ticket_id)
        assert (await first.refused()).reason is Reason.SUPERSEDED
        await again.stands(1)


async def test_full_queue_refuses_new_calls_but_not_one_that_returns() -> None:
    async with SchedulerHarness.running(ticket_limit=2) as harness:
        worker = await harness.worker()
        granted = await (await harness.caller()).granted()
        await harness.queue(2)
        refused = await (await harness.caller()).refused()
        assert refused.reason is Reason.QUEUE_FULL
        again = await harness.caller(ticket_id=granted.ticket_id)
        await worker.claim(await again.granted())


async def test_kind_that_no_attached_worker_serves_is_refused() -> None:
    async with SchedulerHarness.running() as harness:
        before = await harness.caller(CHAT)
        await before.stands(1)
        await harness.worker(kinds=[AUDIO, OMNI])
        assert (await (await harness.caller(CHAT)).refused()).reason is Reason.KIND_NOT_SERVED
        other_pool = await harness.caller(AUDIO, pool="elsewhere")
        assert (await other_pool.refused()).reason is Reason.KIND_NOT_SERVED
        # The first CHAT call still waits, but does not block the OMNI call below.
        await (await harness.caller(OMNI)).granted()


async def test_kind_that_only_a_draining_worker_serves_waits() -> None:
    async with SchedulerHarness.running() as harness:
        worker, operator = await harness.worker(), await harness.operator()
        await worker.report(is_draining=True)
        await operator.until(lambda seen: seen.workers["w"].is_draining)
        caller = await harness.caller()
        await caller.stands(1)
        await worker.report(is_draining=False)
        await caller.granted()


async def test_pools_do_not_wait_for_each_other() -> None:
    async with SchedulerHarness.running() as harness:
        left = await harness.worker("left", pool="left")
        await harness.worker("right", pool="right")
        granted = await (await harness.caller(pool="left")).granted()
        await left.claim(granted)
        waiting = await harness.caller(pool="left")
        await waiting.stands(1)
        right = await (await harness.caller(pool="right")).granted()
        assert right.lease_id != granted.lease_id


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"request_id": ""}, "request_id"),
        ({"request_id": "r" * 257}, "request_id"),
        ({"kind": 0}, "kind"),
        ({"kind": 99}, "kind"),
        ({"pool": "p" * 257}, "pool"),
        ({"ticket_id": "q_nonsense"}, "ticket_id"),
        ({"ticket_id": "q_00000000000000FF"}, "ticket_id"),
    ],
)
async def test_malformed_request_is_refused_by_field(fields: dict[str, Any], field: str) -> None:
    async with SchedulerHarness.running() as harness:
        refused = await (await harness.caller(**fields)).refused()
        assert (refused.reason, refused.field) == (Reason.INVALID_FIELD, field)


async def test_ticket_that_was_never_issued_is_not_used() -> None:
    async with SchedulerHarness.running() as harness:
        first = await harness.caller()
        await first.stands(1)
        forged = await harness.caller(ticket_id="q_7fffffffffffffff")
        await forged.stands(2)
        assert forged.ticket_id > first.ticket_id


@pytest.mark.timing
async def test_restarted_scheduler_keeps_the_order_of_the_queue() -> None:
    async with SchedulerHarness.running(resume_grace_s=1.0) as harness:
        worker = await harness.worker()
        running = await (await harness.caller()).granted()
        await worker.claim(running)
        waiting = await harness.queue(3)
        await harness.stop()
        for caller in waiting:
            assert (await caller.refused()).reason is Reason.UNAVAILABLE
        assert (await worker.ended()).reason is Reason.UNAVAILABLE

        await harness.start()
        worker.slots[0].CopyFrom(
            registry_pb2.SlotReport(slot=0, state=FREE, fencing_number=1 << 60)
        )
        await worker.attach_again()  # reports the slot as free
        newcomer = await harness.caller()
        await newcomer.stands(1)
        back = [
            await harness.caller(request_id=caller.request.request_id, **caller.place)
            for caller in reversed(waiting)
        ]
        for caller in back:
            await caller.read()
        for caller in (*reversed(back), newcomer):
            granted = await caller.granted()
            claims = await worker.claim(granted)
            await worker.finish(claims.slot)
        assert {queued.position for queued in newcomer.queued} == {1}, "a position has grown"


async def test_new_fabric_grants_without_a_resume_grace() -> None:
    async with SchedulerHarness.running(resume_grace_s=60) as harness:
        worker = await harness.worker()
        for _ in range(2):
            await worker.claim(await (await harness.caller()).granted())
            await worker.finish(0)


async def test_numbers_rise_above_what_workers_have_seen() -> None:
    async with SchedulerHarness.running() as harness:
        hour_ms = 3_600_000  # from a scheduler with a fast clock
        seen = revisions.at(wall_clock.now_ms() + hour_ms) + 12345
        slots = slot_reports(FREE)
        slots[0].fencing_number = seen
        worker = await harness.worker(slots=slots)
        assert worker.registered.worker_epoch > seen
        claims = await worker.claim(await (await harness.caller()).granted())
        assert claims.fencing_number > seen


async def test_library_client_keeps_its_place_over_a_restart() -> None:
    async with SchedulerHarness.running() as harness, FabricClient([harness.address]) as client:
        places: asyncio.Queue[lease_pb2.Queued] = asyncio.Queue()
        request = lease_pb2.AcquireLeaseRequest(request_id="r", kind=AUDIO)
        async with asyncio.timeout(WITHIN_S), asyncio.TaskGroup() as tasks:
            acquiring = tasks.create_task(client.acquire(request, places.put))
            before = await places.get()
            await harness.stop()
            await harness.start()
            after = await places.get()
            assert (after.ticket_id, after.position) == (before.ticket_id, 1)
            await harness.worker()
            assert (await acquiring).ticket_id == before.ticket_id


async def test_occupied_slot_is_not_granted() -> None:
    async with SchedulerHarness.running() as harness:
        slots = slot_reports(OCCUPIED, FREE)
        slots[0].lease_id = "elsewhere"
        worker = await harness.worker(slots=slots)
        claims = await worker.claim(await (await harness.caller()).granted())
        assert claims.slot == 1
        waiting = await harness.caller()
        await waiting.stands(1)
        await worker.finish(0)
        await waiting.granted()
