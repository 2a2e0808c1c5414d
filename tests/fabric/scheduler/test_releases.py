"""LeaseService over sockets: a caller releases its lease."""

from __future__ import annotations

import pytest
from support.scheduler.scheduler_harness import CLEANING, FREE, SchedulerHarness, slot_reports

from duplane.fabric.v1 import lease_pb2, registry_pb2

pytestmark = pytest.mark.usefixtures("every_store")


async def test_release_of_an_unclaimed_lease_frees_its_slot_at_once() -> None:
    async with SchedulerHarness.running() as harness:
        worker = await harness.worker()
        granted = await (await harness.caller()).granted()
        waiting = await harness.caller()
        await waiting.stands(1)
        await harness.release(granted.lease_id)
        await waiting.granted()
        assert (await worker.revoked()).lease_id == granted.lease_id


async def test_slot_of_a_returned_grant_waits_for_the_report_of_its_number() -> None:
    """The caller releases the lease right after the claim, before the worker reports the claim."""
    async with SchedulerHarness.running() as harness:
        operator = await harness.operator()
        worker = await harness.worker()
        worker.obeys_revokes = False
        granted = await (await harness.caller()).granted()
        claims = lease_pb2.LeaseClaims.FromString(granted.lease.claims)
        await harness.release(granted.lease_id)
        revoke = await worker.revoked()
        waiting = await harness.caller()
        await waiting.stands(1)
        slot = worker.slots[0]  # the claim was accepted; the slot is being cleaned now
        slot.state = registry_pb2.SLOT_STATE_CLEANING
        slot.lease_id = granted.lease_id
        slot.fencing_number = claims.fencing_number
        await worker.report()
        await operator.until(lambda seen: seen.workers["w"].worker.slots[0].state == CLEANING)
        assert not operator.leases, "granted before it was clean"
        slot.CopyFrom(registry_pb2.SlotReport(state=FREE, fencing_number=revoke.fencing_number))
        await worker.report()
        assert (await waiting.granted()).worker_id == "w"


async def test_release_of_a_claimed_lease_waits_for_the_worker() -> None:
    async with SchedulerHarness.running() as harness:
        operator = await harness.operator()
        worker = await harness.worker()
        granted = await (await harness.caller()).granted()
        await worker.claim(granted)
        await operator.until(lambda seen: seen.leases[granted.lease_id].is_claimed)
        waiting = await harness.caller()
        await waiting.stands(1)
        await harness.release(granted.lease_id)
        revoke = await worker.revoked()
        assert (revoke.slot, revoke.lease_id) == (0, granted.lease_id)
        assert granted.lease_id in operator.leases
        worker.slots[0].state = registry_pb2.SLOT_STATE_CLEANING
        await worker.report()
        await operator.until(lambda seen: not seen.leases)
        assert operator.tickets, "granted before the cleanup was over"
        worker.slots[0].CopyFrom(slot_reports(FREE)[0])
        worker.slots[0].fencing_number = revoke.fencing_number
        await worker.report()
        await waiting.granted()


async def test_release_of_an_unknown_lease_succeeds() -> None:
    async with SchedulerHarness.running() as harness:
        await harness.release("never existed")
