"""Workers that drain: the request, its reversal, and what it means for grants."""

from __future__ import annotations

import pytest
from support.scheduler.scheduler_harness import SchedulerHarness

from duplane.fabric.errors import FabricError, Reason

pytestmark = pytest.mark.usefixtures("every_store")


async def test_drained_worker_is_asked_to_drain_and_gets_no_more_grants() -> None:
    async with SchedulerHarness.running() as harness:
        operator, worker = await harness.operator(), await harness.worker(slot_count=2)
        running = await (await harness.caller()).granted()
        await worker.claim(running)
        await operator.drain("w")
        await worker.until(lambda: any(one.HasField("drain") for one in worker.received))
        waiting = await harness.caller()
        await waiting.stands(1)
        await worker.report(is_draining=True)
        await operator.until(lambda seen: seen.workers["w"].report.is_draining)
        assert operator.workers["w"].is_draining
        assert running.lease_id in operator.leases, "a running session was touched"
        await worker.finish(0)
        await harness.worker("fresh")
        assert (await waiting.granted()).worker_address


async def test_drain_is_taken_back_as_often_as_asked() -> None:
    async with SchedulerHarness.running() as harness:
        operator, worker = await harness.operator(), await harness.worker()

        async def told(which: str) -> None:
            await worker.until(lambda: any(one.HasField(which) for one in worker.received))
            worker.received.clear()

        waiting = None
        for _ in range(2):
            await operator.drain("w")
            await told("drain")
            await worker.report(is_draining=True)
            await operator.until(lambda seen: seen.workers["w"].report.is_draining)
            waiting = waiting or await harness.caller()
            await waiting.stands(1)
            await operator.undrain("w")
            await told("undrain")
            await operator.until(lambda seen: seen.workers["w"].is_draining)
        await worker.report()
        assert waiting
        await waiting.granted()


async def test_drain_of_an_earlier_registration_is_taken_back() -> None:
    async with SchedulerHarness.running() as harness:
        operator, worker = await harness.operator(), await harness.worker(is_draining=True)
        await operator.until(lambda seen: seen.workers["w"].is_draining)
        await operator.undrain("w")
        await worker.until(lambda: any(one.HasField("undrain") for one in worker.received))


async def test_stopped_worker_is_told_to_stop_and_this_cannot_be_taken_back() -> None:
    async with SchedulerHarness.running() as harness:
        operator, worker = await harness.operator(), await harness.worker()
        await operator.drain("w")
        await operator.drain("w", is_stop=True)
        await worker.until(lambda: any(one.drain.is_stop for one in worker.received))
        await operator.undrain("w")
        await worker.report()
        await operator.until(lambda seen: seen.workers["w"].HasField("report"))
        assert operator.workers["w"].is_draining
        assert not any(one.HasField("undrain") for one in worker.received)


async def test_worker_that_attaches_as_draining_gets_no_grants() -> None:
    async with SchedulerHarness.running() as harness:
        await harness.worker(is_draining=True)
        await (await harness.caller()).stands(1)


async def test_unknown_worker_cannot_be_drained() -> None:
    async with SchedulerHarness.running() as harness:
        with pytest.raises(FabricError) as refused:
            await (await harness.operator()).drain("nobody")
        assert (refused.value.reason, refused.value.field) == (Reason.UNKNOWN_WORKER, "worker_id")
        with pytest.raises(FabricError) as refused:
            await (await harness.operator()).undrain("nobody")
        assert (refused.value.reason, refused.value.field) == (Reason.UNKNOWN_WORKER, "worker_id")
