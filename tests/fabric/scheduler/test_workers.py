"""RegistryService over sockets: attaching, reports, broken streams, attaching again."""

from __future__ import annotations

import asyncio

import pytest
from support.scheduler.scheduler_harness import (
    AUDIO,
    BROKEN,
    CLEANING,
    FREE,
    OCCUPIED,
    FakeWorker,
    SchedulerHarness,
    register_message,
    slot_reports,
)
from support.scheduler.watching_operator import Operator
from support.time_limits import WITHIN_S

from duplane.fabric.durations import to_seconds
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.v1 import admin_pb2, lease_pb2, registry_pb2
from duplane.scheduler.store.base import Grant
from duplane.scheduler.store.measured import MeasuredStore
from duplane.tools.operators.snapshots import read_fabric
from duplane.tools.operators.tables import fabric_tables

pytestmark = pytest.mark.usefixtures("every_store")


def states(seen: Operator, worker_id: str = "w") -> list[int]:
    return [slot.state for slot in seen.workers[worker_id].worker.slots]


async def test_session_that_cannot_move_is_shown_to_operators() -> None:
    async with SchedulerHarness.running() as harness:
        worker = await harness.worker(slot_count=2)
        for session_id in ("fixed", "movable"):
            await worker.claim(await (await harness.caller(session_id=session_id)).granted())
        fixed = next(slot for slot in worker.slots if slot.session_id == "fixed")
        fixed.cannot_move = True
        await worker.report()
        operator = await harness.operator()
        await operator.until(lambda seen: list(seen.workers["w"].worker.slots) == worker.slots)
        await operator.until(lambda seen: all(one.is_claimed for one in seen.leases.values()))
        table = fabric_tables(await read_fabric([harness.address]), 9)
        rows = {row.split()[0]: row for row in table.splitlines() if row}
        assert "  cannot move  " in rows["fixed"]
        assert "  claimed  " in rows["movable"]


async def test_session_waits_until_its_worker_offers_the_slot_again() -> None:
    async with SchedulerHarness.running() as harness:
        worker = await harness.worker()
        worker.slots[0].is_withheld = True
        await worker.report()
        operator = await harness.operator()
        await operator.until(lambda seen: list(seen.workers["w"].worker.slots) == worker.slots)
        caller = await harness.caller()
        await operator.until(lambda seen: len(seen.tickets) == 1)
        worker.slots[0].is_withheld = False
        await worker.report()
        await worker.claim(await caller.granted())


async def test_registered_contains_epoch_keys_and_interval() -> None:
    async with SchedulerHarness.running(report_interval_s=1.5) as harness:
        told = (await harness.worker()).registered
        assert told.worker_epoch > 0
        assert told.report_interval.ToTimedelta().total_seconds() == 1.5
        assert [len(key.public_key) for key in told.verification_keys] == [32]


@pytest.mark.timing
async def test_worker_learns_how_far_fencing_numbers_are() -> None:
    async with SchedulerHarness.running(report_interval_s=0.05) as scheduler:
        worker = await scheduler.worker(slot_count=2)
        granted = await (await scheduler.caller()).granted()
        number = (await worker.claim(granted)).fencing_number

        def has_reached() -> bool:
            return any(one.progress.fencing_number >= number for one in worker.received)

        while not has_reached():
            await worker.report()
        reached = max(one.progress.fencing_number for one in worker.received)
        later = await worker.claim(await (await scheduler.caller()).granted())
        assert later.fencing_number > reached


async def test_worker_whose_stream_breaks_gets_no_more_grants() -> None:
    async with SchedulerHarness.running() as harness:
        operator, worker = await harness.operator(), await harness.worker()
        await worker.claim(await (await harness.caller()).granted())
        await operator.until(lambda seen: any(one.is_claimed for one in seen.leases.values()))
        await worker.vanish()
        await operator.until(lambda seen: not seen.workers and not seen.leases)
        caller = await harness.caller()
        await caller.stands(1)


async def test_sessions_of_a_worker_that_attaches_again_are_listed_again() -> None:
    async with SchedulerHarness.running() as harness:
        operator, worker = await harness.operator(), await harness.worker(slot_count=2)
        granted = await (await harness.caller(session_id="s1")).granted()
        claims = await worker.claim(granted)
        first_epoch = worker.registered.worker_epoch
        await worker.vanish()
        await operator.until(lambda seen: not seen.workers)
        await worker.attach_again()
        assert worker.registered.worker_epoch > first_epoch
        await operator.until(lambda seen: granted.lease_id in seen.leases)
        lease = operator.leases[granted.lease_id]
        assert lease.is_claimed
        assert (lease.claims.session_id, lease.claims.kind) == ("s1", AUDIO)
        other = await worker.claim(await (await harness.caller()).granted())
        assert other.slot == 1 - claims.slot
        await worker.finish(claims.slot)
        await operator.until(lambda seen: granted.lease_id not in seen.leases)


async def test_claim_that_overtakes_a_lost_stream_shows_when_reported() -> None:
    """The grant ends with the stream, but the worker has accepted the claim and reports it."""
    async with SchedulerHarness.running() as harness:
        operator, worker = await harness.operator(), await harness.worker()
        granted = await (await harness.caller()).granted()
        await worker.vanish()
        await operator.until(lambda seen: not seen.workers and not seen.leases)
        await worker.attach_again()
        worker.slots[0].CopyFrom(
            registry_pb2.SlotReport(
                slot=0, state=OCCUPIED, fencing_number=7, lease_id=granted.lease_id
            )
        )
        await worker.report()
        await operator.until(lambda seen: granted.lease_id in seen.leases)
        await (await harness.caller()).stands(1)


async def test_same_process_that_attaches_again_supersedes_its_old_stream() -> None:
    async with SchedulerHarness.running() as harness:
        operator, worker = await harness.operator(), await harness.worker()
        twin = FakeWorker(await harness.channel(), worker.register)
        await twin.attach()
        assert (await worker.ended()).reason is Reason.SUPERSEDED
        assert twin.registered.worker_epoch > worker.registered.worker_epoch
        await twin.claim(await (await harness.caller()).granted())
        await operator.until(lambda seen: OCCUPIED in states(seen))
        assert [one.worker_epoch for one in operator.workers.values()] == [
            twin.registered.worker_epoch
        ]
        await twin.vanish()


async def test_another_process_under_a_live_id_is_refused_and_the_first_goes_on() -> None:
    async with SchedulerHarness.running() as harness:
        worker = await harness.worker()
        with pytest.raises(FabricError) as refused:
            await harness.worker(incarnation="another")
        assert refused.value.reason is Reason.WORKER_ATTACHED
        await worker.claim(await (await harness.caller()).granted())


async def test_restarted_process_may_take_the_id_of_a_dead_one() -> None:
    async with SchedulerHarness.running() as harness:
        operator, worker = await harness.operator(), await harness.worker()
        await worker.vanish()
        await operator.until(lambda seen: not seen.workers)
        again = await harness.worker(incarnation="another")
        assert again.registered.worker_epoch > worker.registered.worker_epoch


@pytest.mark.parametrize("state", [CLEANING, BROKEN])
async def test_slot_that_is_not_free_is_not_granted(state: registry_pb2.SlotState) -> None:
    async with SchedulerHarness.running() as harness:
        worker = await harness.worker(slots=slot_reports(state))
        caller = await harness.caller()
        await caller.stands(1)
        worker.slots[0].state = FREE
        await worker.report()
        await caller.granted()


async def test_slot_whose_cleanup_failed_is_never_granted_again() -> None:
    async with SchedulerHarness.running() as harness:
        operator, worker = await harness.operator(), await harness.worker(slot_count=2)
        claims = await worker.claim(await (await harness.caller()).granted())
        await worker.finish(claims.slot, BROKEN)
        await operator.until(lambda seen: BROKEN in states(seen) and not seen.leases)
        assert (
            await worker.claim(await (await harness.caller()).granted())
        ).slot == 1 - claims.slot
        await (await harness.caller()).stands(1)


@pytest.mark.timing
async def test_silent_worker_is_not_granted_until_it_reports() -> None:
    async with SchedulerHarness.running(report_interval_s=0.05) as harness:
        operator, worker = await harness.operator(), await harness.worker()
        # The first message shows the registration, the second one shows the worker as silent.
        await operator.until(lambda seen: sum(one.HasField("worker") for one in seen.steps) == 2)
        assert operator.workers["w"].is_silent
        caller = await harness.caller()
        await caller.stands(1)
        await worker.report()
        await caller.granted()
        await operator.until(lambda seen: not seen.workers["w"].is_silent)


@pytest.mark.timing
async def test_age_of_the_last_report_is_shown() -> None:
    async with SchedulerHarness.running(report_interval_s=0.05) as harness:
        operator = await harness.operator()
        await harness.worker()
        await operator.until(lambda seen: "w" in seen.workers and seen.workers["w"].is_silent)
        listed = await operator.stub.ListWorkers(admin_pb2.ListWorkersRequest())
        assert to_seconds(listed.workers[0].report_age) >= 0.15


async def test_sessions_are_spread_over_workers() -> None:
    async with SchedulerHarness.running() as harness:
        workers = [await harness.worker(f"w{index}", slot_count=2) for index in range(3)]
        by_id = {worker.register.worker_id: worker for worker in workers}
        order: list[str] = []
        for _ in range(6):
            granted = await (await harness.caller()).granted()
            claims = lease_pb2.LeaseClaims.FromString(granted.lease.claims)
            await by_id[claims.worker_id].claim(granted)
            order.append(claims.worker_id)
        assert sorted(order[:3]) == sorted(order[3:]) == ["w0", "w1", "w2"]


async def test_two_slots_cannot_name_one_lease() -> None:
    """If a worker reports a lease on two slots, the scheduler lists it once and continues."""
    async with SchedulerHarness.running() as harness:
        operator, slots = await harness.operator(), slot_reports(OCCUPIED, OCCUPIED)
        slots[0].lease_id = slots[1].lease_id = "same"
        worker = await harness.worker(slots=slots)
        await operator.until(lambda seen: [one.claims.slot for one in seen.leases.values()] == [0])
        await worker.finish(0)
        await worker.finish(1)
        await operator.until(lambda seen: not seen.leases)
        await worker.claim(await (await harness.caller()).granted())


async def test_worker_that_ends_its_stream_in_order_is_removed() -> None:
    async with SchedulerHarness.running() as harness:
        operator, worker = await harness.operator(), await harness.worker()
        await worker.leave()
        await operator.until(lambda seen: not seen.workers and not seen.lost)


async def test_lost_worker_is_listed_with_its_last_report_and_sessions() -> None:
    async with SchedulerHarness.running() as harness:
        operator, worker = await harness.operator(), await harness.worker(slot_count=2)
        await worker.claim(await (await harness.caller(session_id="s1")).granted())
        await worker.report(unit_count=7)
        await operator.until(lambda seen: seen.workers["w"].report.unit_count == 7)
        await worker.vanish()
        await operator.until(lambda seen: "w" in seen.lost)
        listed = await operator.stub.ListWorkers(admin_pb2.ListWorkersRequest())
        seen_later = await harness.operator()
        for lost in (operator.lost["w"], seen_later.lost["w"], *listed.workers):
            assert lost.is_silent
            assert lost.lost_reason
            assert lost.report.unit_count == 7
            assert [slot.session_id for slot in lost.worker.slots if slot.state == OCCUPIED] == [
                "s1"
            ]
        assert harness.metrics.get_sample_value("duplane_workers", {"state": "lost"}) == 1
        assert harness.metrics.get_sample_value("duplane_workers", {"state": "ready"}) == 0
        again = await harness.worker("restarted", incarnation="another")
        await operator.until(lambda seen: not seen.lost and "restarted" in seen.workers)
        await again.claim(await (await harness.caller()).granted())


async def test_worker_that_vanishes_while_it_attaches_does_not_stay_registered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with SchedulerHarness.running() as harness:
        operator, adopting = await harness.operator(), asyncio.Event()

        async def adopt(*_: object) -> bool:
            adopting.set()
            return await asyncio.Event().wait()

        monkeypatch.setattr(MeasuredStore, "adopt", adopt)
        slot = registry_pb2.SlotReport(lease_id="lease", state=OCCUPIED, fencing_number=1)
        register = register_message(slots=[slot])
        worker = FakeWorker(await harness.channel(), register)
        attaching = asyncio.create_task(worker.attach())
        await asyncio.wait_for(adopting.wait(), WITHIN_S)
        await operator.until(lambda seen: "w" in seen.workers)
        await worker.vanish()
        attaching.cancel()
        await asyncio.gather(attaching, return_exceptions=True)
        await operator.until(lambda seen: not seen.workers)


async def test_slot_that_is_given_back_while_others_are_settled_is_granted_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The revoke comes after the registration, before the store has adopted all its leases."""
    async with SchedulerHarness.running() as harness:
        operator, may_adopt, adopting = await harness.operator(), asyncio.Event(), list[str]()
        real_adopt = MeasuredStore.adopt

        async def adopt(store: MeasuredStore, grant: Grant) -> bool:
            adopting.append(grant.claims.lease_id)
            await may_adopt.wait()
            return await real_adopt(store, grant)

        monkeypatch.setattr(MeasuredStore, "adopt", adopt)
        slots = slot_reports(OCCUPIED, OCCUPIED, FREE)
        slots[0].lease_id, slots[1].lease_id = "first", "second"
        slots[0].fencing_number = slots[1].fencing_number = 1
        worker = await harness.worker(slots=slots)
        granted = await (await harness.caller()).granted()
        await harness.release(granted.lease_id)
        revoke = await worker.revoked()
        assert (revoke.slot, revoke.lease_id) == (2, granted.lease_id)
        assert adopting == ["first", "second"], "settled one after another"
        assert not operator.leases.keys() & {"first", "second"}
        await worker.finish(0)  # this report must count as later than the registration
        may_adopt.set()
        await operator.until(lambda seen: set(seen.leases) == {"second"})
        free = [await worker.claim(await (await harness.caller()).granted()) for _ in range(2)]
        assert {claims.slot for claims in free} == {0, 2}


@pytest.mark.timing
async def test_lost_revoke_is_repeated_after_a_report() -> None:
    async with SchedulerHarness.running(report_interval_s=0.05) as harness:
        worker = await harness.worker()
        worker.obeys_revokes = False
        granted = await (await harness.caller()).granted()
        await harness.release(granted.lease_id)
        await worker.revoked()
        worker.received.clear()
        async with asyncio.timeout(WITHIN_S):
            while not any(one.HasField("revoke") for one in worker.received):
                await worker.report()
        await worker.obey(await worker.revoked())
        await worker.claim(await (await harness.caller()).granted())
