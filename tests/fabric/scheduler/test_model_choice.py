"""The model that a client names: one rule, decided by the scheduler."""

from __future__ import annotations

import pytest
from support.scheduler.scheduler_harness import OMNI, SchedulerHarness

from duplane.fabric.errors import Reason

pytestmark = pytest.mark.usefixtures("every_store")


async def test_named_model_that_a_worker_has_is_a_demand() -> None:
    async with SchedulerHarness.running() as harness:
        await harness.worker("a", slot_count=8, labels={"model": "a"})
        worker = await harness.worker("b", labels={"model": "b"})
        first = await (await harness.caller(model="b")).granted()
        assert (first.worker_id, first.model_label) == ("b", "b")
        await worker.claim(first)
        second = await harness.caller(model="b")
        await second.stands(1)
        await worker.finish(0)
        assert (await second.granted()).worker_id == "b"


async def test_unknown_name_gets_the_only_model() -> None:
    async with SchedulerHarness.running() as harness:
        await harness.worker("a", labels={"model": "a", "zone": "x"})
        await harness.worker("a2", labels={"model": "a", "zone": "y"})
        granted = await (await harness.caller(model="minicpm-o-4.5-realtime")).granted()
        assert granted.model_label == "a"


async def test_unknown_name_is_refused_with_the_names_of_several_models() -> None:
    async with SchedulerHarness.running() as harness:
        await harness.worker("b", labels={"model": "b"})
        await harness.worker("a", labels={"model": "a"})
        refused = await (await harness.caller(model="c")).refused()
        assert refused.reason is Reason.MODEL_NOT_SERVED
        assert refused.message == "no worker serves the model 'c'; served are: a, b"


async def test_only_workers_that_meet_the_other_needs_decide() -> None:
    async with SchedulerHarness.running() as harness:
        await harness.worker("a", labels={"model": "a", "zone": "x"})
        await harness.worker("b", labels={"model": "b", "zone": "y"})
        granted = await (await harness.caller(model="b", needs={"zone": "x"})).granted()
        assert granted.model_label == "a"


async def test_named_model_replaces_the_needed_one_only_if_it_is_served() -> None:
    async with SchedulerHarness.running() as harness:
        await harness.worker("a", labels={"model": "a"})
        await harness.worker("b", labels={"model": "b"})
        for name, got in (("b", "b"), ("unknown", "a")):
            caller = await harness.caller(model=name, needs={"model": "a"})
            assert (await caller.granted()).model_label == got


async def test_named_model_that_does_not_serve_the_kind_is_refused_as_before() -> None:
    async with SchedulerHarness.running() as harness:
        await harness.worker("a", labels={"model": "a"})
        for name in ("a", "unknown"):
            refused = await (await harness.caller(OMNI, model=name)).refused()
            assert refused.reason is Reason.KIND_NOT_SERVED


async def test_draining_worker_of_another_model_does_not_make_the_name_ambiguous() -> None:
    async with SchedulerHarness.running() as harness:
        await harness.worker("a", labels={"model": "a"}, is_draining=True)
        await harness.worker("b", labels={"model": "b"})
        assert (await (await harness.caller(model="c")).granted()).model_label == "b"


async def test_ticket_waits_for_the_first_worker_and_then_for_its_name() -> None:
    async with SchedulerHarness.running() as harness:
        caller = await harness.caller(model="c")
        await caller.stands(1)
        await harness.worker("a", labels={"model": "a"})
        assert (await caller.granted()).model_label == "a"


async def test_waiting_caller_is_refused_when_a_second_model_makes_its_name_ambiguous() -> None:
    async with SchedulerHarness.running(queued_interval_s=0.05) as harness:
        worker = await harness.worker("a", labels={"model": "a"})
        await worker.claim(await (await harness.caller()).granted())
        caller = await harness.caller(model="c")
        await caller.stands(1)
        await harness.worker("b", labels={"model": "b"})
        assert (await caller.refused()).reason is Reason.MODEL_NOT_SERVED


@pytest.mark.parametrize("others", [["b"], ["b", "c"]], ids=["one other", "several others"])
async def test_waiting_caller_gets_its_model_although_the_only_worker_restarts(
    others: list[str],
) -> None:
    async with SchedulerHarness.running(queued_interval_s=0.05) as harness:
        worker = await harness.worker("a", labels={"model": "a"})
        for number, name in enumerate(others, start=2):
            address = f"127.0.0.1:{number}"
            await harness.worker(name, slot_count=8, labels={"model": name}, address=address)
        await worker.claim(await (await harness.caller(model="a")).granted())
        caller = await harness.caller(model="a")
        await caller.stands(1)
        await worker.vanish()
        assert (await caller.read()).queued.position == 1
        again = await harness.caller(
            request_id=caller.request.request_id, **caller.place, model="a"
        )
        await again.stands(1)
        await harness.worker("a", labels={"model": "a"}, incarnation="a/2")
        assert (await again.granted()).model_label == "a"


@pytest.mark.parametrize("model", ["m" * 129])
async def test_malformed_model_is_refused(model: str) -> None:
    async with SchedulerHarness.running() as harness:
        refused = await (await harness.caller(model=model)).refused()
        assert (refused.reason, refused.field) == (Reason.INVALID_FIELD, "model")
