"""Needs: a request gets a worker with the needed labels; each set of needs has its own queue."""

from __future__ import annotations

import pytest
from support.scheduler.scheduler_harness import CHAT, SchedulerHarness

from duplane.fabric.errors import Reason
from duplane.fabric.settings import parse_labels

pytestmark = pytest.mark.usefixtures("every_store")


async def test_lease_is_granted_on_a_worker_with_the_needed_labels() -> None:
    async with SchedulerHarness.running() as harness:
        await harness.worker("plain", slot_count=8)
        await harness.worker("labelled", labels={"model": "a", "zone": "x", "device": "cuda"})
        caller = await harness.caller(needs={"model": "a", "zone": "x"})
        assert (await caller.granted()).worker_id == "labelled"


async def test_queues_of_different_needs_do_not_wait_for_each_other() -> None:
    async with SchedulerHarness.running() as harness:
        worker = await harness.worker("a", labels={"model": "a"})
        await worker.claim(await (await harness.caller(needs={"model": "a"})).granted())
        first = await harness.caller(needs={"model": "a"})
        await first.stands(1)
        await harness.worker("b", labels={"model": "b"})
        assert (await (await harness.caller(needs={"model": "b"})).granted()).worker_id == "b"
        second = await harness.caller(needs={"model": "a"})
        await second.stands(2)
        assert second.queued[-1].queue_length == 2
        other = await harness.caller(needs={"model": "b"})
        await other.stands(1)
        assert other.queued[-1].queue_length == 1


async def test_slot_that_several_queues_can_use_goes_to_the_oldest_ticket() -> None:
    async with SchedulerHarness.running() as harness:
        worker = await harness.worker(labels={"model": "a", "zone": "x"})
        await worker.claim(await (await harness.caller()).granted())
        callers = [
            await harness.caller(needs=needs) for needs in ({"model": "a"}, {}, {"zone": "x"})
        ]
        tickets: list[str] = []
        for caller in callers:
            await caller.stands(1)
        for caller in sorted(callers, key=lambda caller: caller.ticket_id):
            await worker.finish(0)
            granted = await caller.granted()
            tickets.append(granted.ticket_id)
            await worker.claim(granted)
        assert tickets == sorted(tickets)


async def test_ticket_whose_worker_has_left_blocks_no_other() -> None:
    async with SchedulerHarness.running() as harness:
        gone = await harness.worker("a", labels={"model": "a"})
        await gone.claim(await (await harness.caller(needs={"model": "a"})).granted())
        waiting = await harness.caller(needs={"model": "a"})
        await waiting.stands(1)
        await harness.worker("b", labels={"model": "b"})
        await gone.vanish()
        assert (await (await harness.caller()).granted()).worker_id == "b"
        again = await harness.worker("a2", labels={"model": "a"})
        assert (await waiting.granted()).worker_id == again.register.worker_id


async def test_needs_that_no_attached_worker_meets_are_refused_by_name() -> None:
    async with SchedulerHarness.running() as harness:
        await harness.worker(labels={"model": "a"})
        refused = await (await harness.caller(needs={"model": "b"})).refused()
        assert refused.reason is Reason.KIND_NOT_SERVED
        assert "with model=b" in refused.message
        both = await (await harness.caller(CHAT, needs={"model": "a"})).refused()
        assert both.reason is Reason.KIND_NOT_SERVED


async def test_session_of_an_expected_pool_without_workers_waits_for_the_first_one() -> None:
    async with SchedulerHarness.running(pools=("empty",)) as harness:
        await harness.worker("a")
        refused = await (await harness.caller(pool="unknown")).refused()
        assert refused.reason is Reason.KIND_NOT_SERVED
        waiting = await harness.caller(pool="empty", needs={"model": "m"})
        await waiting.stands(1)
        await harness.worker("b", pool="empty", labels={"model": "m"})
        assert (await waiting.granted()).worker_id == "b"
        refused = await (await harness.caller(pool="empty", needs={"model": "n"})).refused()
        assert refused.reason is Reason.KIND_NOT_SERVED


async def test_ticket_cannot_be_taken_over_with_other_needs() -> None:
    async with SchedulerHarness.running() as harness:
        first = await harness.caller(needs={"model": "a"})
        await first.stands(1)
        other = await harness.caller(ticket_id=first.ticket_id, needs={"model": "b"})
        refused = await other.refused()
        assert (refused.reason, refused.field) == (Reason.INVALID_FIELD, "ticket_id")


@pytest.mark.parametrize(
    "needs",
    [{"": "a"}, {"model": ""}, {"model": "m" * 129}, {str(name): "a" for name in range(17)}],
    ids=["no name", "no value", "long", "many"],
)
async def test_malformed_needs_are_refused(needs: dict[str, str]) -> None:
    async with SchedulerHarness.running() as harness:
        refused = await (await harness.caller(needs=needs)).refused()
        assert (refused.reason, refused.field) == (Reason.INVALID_FIELD, "needs")


def test_labels_are_parsed_from_settings() -> None:
    assert parse_labels(["zone=a", " model = b=c "], "labels") == {"zone": "a", "model": "b=c"}
    for texts in (["zone"], ["=a"], ["zone="], ["a=b", "a=c"], [f"k{n}=v" for n in range(17)]):
        with pytest.raises(ValueError, match=r"^labels: "):
            parse_labels(texts, "labels")
