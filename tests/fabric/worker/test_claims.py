"""Claims on a real worker: valid leases get their slot, others are refused with a reason."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest
from support.slept_loop import SleptLoop
from support.worker.worker_harness import refusal, running_worker, unit

from duplane.fabric.errors import Reason
from duplane.fabric.lease_signing import LeaseSigner
from duplane.fabric.v1 import lease_pb2, registry_pb2, session_pb2


async def test_a_lease_claimed_twice_is_stale_and_the_session_goes_on() -> None:
    async with running_worker() as rig:
        granted = rig.grant()
        async with rig.opened(granted) as client:
            error = await refusal(rig, granted)
            assert error.reason is Reason.LEASE_STALE
            await client.send(unit(0))
            assert (await client.delta()).sequence == 0
        await rig.all_free()
        assert (await refusal(rig, granted)).reason is Reason.LEASE_STALE


async def test_a_newer_lease_does_not_take_an_occupied_slot() -> None:
    async with running_worker() as rig, rig.opened(rig.grant(0)) as client:
        assert (await refusal(rig, rig.grant(0))).reason is Reason.SLOT_OCCUPIED
        await client.send(unit(0))
        assert (await client.delta()).sequence == 0


async def test_a_lease_older_than_one_seen_is_stale() -> None:
    async with running_worker() as rig:
        older, newer = rig.grant(0), rig.grant(0)
        async with rig.claimed(newer) as client:
            await client.close()
        await rig.all_free()
        assert (await refusal(rig, older)).reason is Reason.LEASE_STALE


async def test_a_lease_of_an_unknown_key_is_forged() -> None:
    async with running_worker() as rig:
        granted = rig.grant()
        granted.lease.CopyFrom(LeaseSigner().sign(rig.claims()))
        assert (await refusal(rig, granted)).reason is Reason.LEASE_FORGED


async def test_a_lease_that_was_altered_is_forged() -> None:
    async with running_worker() as rig:
        granted = rig.grant(0)
        granted.lease.claims = rig.claims(1).SerializeToString()
        assert (await refusal(rig, granted)).reason is Reason.LEASE_FORGED


@pytest.mark.parametrize(
    ("claims", "reason"),
    [
        ({"worker_id": "another"}, Reason.WRONG_WORKER),
        ({"worker_epoch": 100}, Reason.WRONG_EPOCH),
        ({"slot": 2}, Reason.INVALID_FIELD),
        ({"slot": -1}, Reason.INVALID_FIELD),
        ({"kind": lease_pb2.SESSION_KIND_CHAT}, Reason.KIND_NOT_SERVED),
        ({"fencing_number": 0}, Reason.LEASE_STALE),
    ],
)
async def test_a_lease_for_something_else_is_refused(claims: dict, reason: Reason) -> None:
    async with running_worker() as rig:
        assert (await refusal(rig, rig.grant(**claims))).reason is reason
        async with rig.claimed():  # the refused claim occupied no slot and raised no fencing number
            pass


async def test_the_wall_clock_decides_about_no_lease() -> None:
    """The worker computes the ages of leases from fencing numbers: see `test_lease_ages.py`."""
    async with running_worker() as rig:
        for hours in (-24, 24):
            claims = rig.claims()
            claims.expire_time.FromDatetime(datetime.now(UTC) + timedelta(hours=hours))
            async with rig.claimed(rig.grant(expire_time=claims.expire_time)):
                pass
            await rig.all_free()


def test_clock_of_the_event_loop_may_differ_from_the_monotonic_clock() -> None:
    async def converse() -> None:
        async with running_worker() as rig, rig.opened() as client:
            await client.send(unit(0))
            assert (await client.delta()).sequence == 0

    with asyncio.Runner(loop_factory=SleptLoop) as runner:
        runner.run(converse())


async def test_a_revoked_lease_is_refused() -> None:
    async with running_worker() as rig:
        granted = rig.grant(1)
        number = lease_pb2.LeaseClaims.FromString(granted.lease.claims).fencing_number
        revoke = registry_pb2.Revoke(slot=1, fencing_number=number, lease_id=granted.lease_id)
        await rig.scheduler.tell(revoke=revoke)
        await rig.scheduler.until(lambda: rig.scheduler.report.slots[1].fencing_number == number)
        assert (await refusal(rig, granted)).reason is Reason.LEASE_STALE


async def test_revoking_a_running_lease_closes_its_session_and_no_other() -> None:
    async with running_worker() as rig:
        granted = rig.grant(0)
        number = lease_pb2.LeaseClaims.FromString(granted.lease.claims).fencing_number
        async with rig.opened(granted) as revoked, rig.opened(rig.grant(1)) as other:
            for lease_id in ("another", granted.lease_id):
                revoke = registry_pb2.Revoke(slot=0, fencing_number=number, lease_id=lease_id)
                await rig.scheduler.tell(revoke=revoke)
            assert (await revoked.closed()).reason == session_pb2.CLOSE_REASON_REVOKED
            await rig.all_free(0)
            await other.send(unit(0))
            assert (await other.delta()).sequence == 0


async def test_a_draining_worker_takes_no_claim_and_its_sessions_go_on() -> None:
    async with running_worker() as rig, rig.opened() as client:
        await rig.scheduler.tell(drain=registry_pb2.Drain())
        await rig.scheduler.until(lambda: rig.scheduler.report.is_draining)
        assert (await refusal(rig, rig.grant(1))).reason is Reason.DRAINING
        leaving = await client.leaving()
        assert leaving == session_pb2.Leaving(reason=session_pb2.LEAVING_REASON_DRAIN)
        await client.send(unit(0))
        assert (await client.delta()).sequence == 0


async def test_worker_says_once_that_it_drains() -> None:
    async with running_worker() as rig, rig.opened() as client:
        for _ in range(2):
            await rig.scheduler.tell(drain=registry_pb2.Drain())
        rig.shutdown.drain()
        await client.leaving()
        await client.send(unit(0))
        assert (await client.delta()).sequence == 0


async def test_a_grant_outlives_a_new_registration() -> None:
    """The attach stream breaks between a grant and its claim, but the grant stays valid."""
    async with running_worker() as rig:
        granted = rig.grant()
        await rig.scheduler.stop()
        await rig.scheduler.start(rig.scheduler.address)
        await rig.scheduler.until(lambda: len(rig.scheduler.registers) == 2)
        async with rig.claimed(granted):
            pass
