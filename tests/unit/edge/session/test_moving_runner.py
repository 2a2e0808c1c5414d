"""The runner of a moving session: the workers that it reports, avoids and counts, and its waits."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from support.edge.live_edge import HandSetClock
from support.edge.moved_play import LOST
from support.edge.moved_runner import MovedRunner, WorkerDouble

from duplane.edge.close import CloseReason
from duplane.edge.settings import Limits
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.monitoring import spans
from duplane.fabric.monitoring.spans import Telemetry


async def lose_first(play: MovedRunner, first: WorkerDouble) -> None:
    """Lose the first worker while it has a unit."""
    await play.exchange()
    first.ends["unit"] = None
    await play.chunk()
    await first.until("unit")
    await first.until("unit")
    first.lose()


async def test_client_that_leaves_during_a_rebuild_blames_only_the_lost_worker() -> None:
    first, second = WorkerDouble(), WorkerDouble(rebuild=None)
    async with MovedRunner.running(first, second) as play:
        await lose_first(play, first)
        await second.until("rebuild")
        await play.say('{"type":"stop"}')
    assert play.fabric.unreachable == ["w0"]
    assert play.count("duplane_moves_total") == 1
    assert play.count("duplane_moves_total", cause="worker_lost", outcome="failed") == 1


async def test_client_that_leaves_during_a_rebuild_frees_the_slot_at_once() -> None:
    first, second = WorkerDouble(), WorkerDouble(rebuild=None)
    second.closes = False
    limits = replace(Limits(), close_s=3600.0)
    async with MovedRunner.running(first, second, limits=limits) as play:
        await lose_first(play, first)
        await second.until("rebuild")
        await play.say('{"type":"stop"}')
    assert second.is_cancelled


@pytest.mark.parametrize("reason", [Reason.REBUILD_REFUSED, Reason.REBUILD_DIFFERS])
async def test_worker_that_refuses_to_rebuild_is_not_reported(reason: Reason) -> None:
    first, second = WorkerDouble(), WorkerDouble(rebuild=FabricError(reason, "x"))
    async with MovedRunner.running(first, second) as play:
        await lose_first(play, first)
        await play.until("error")
    assert play.session.closed
    assert play.fabric.unreachable == ["w0"]
    assert play.count("duplane_moves_total") == 1


async def test_worker_that_rebuilds_when_the_time_is_over_is_not_reported() -> None:
    first, second = WorkerDouble(), WorkerDouble(rebuild=None)
    limits = replace(Limits(), failover_s=0.2)
    async with MovedRunner.running(first, second, limits=limits) as play:
        await lose_first(play, first)
        await play.until("error")
    assert play.session.closed
    assert play.session.closed.reason is CloseReason.FAILED
    assert play.fabric.unreachable == ["w0"]
    assert play.count("duplane_moves_total") == 1


async def test_worker_that_is_lost_before_it_has_opened_is_reported_and_avoided() -> None:
    first, second = WorkerDouble(open=LOST), WorkerDouble()
    async with MovedRunner.running(first, second) as play:
        await play.exchange()
        await play.say('{"type":"stop"}')
    assert play.fabric.unreachable == ["w0"]
    assert [list(one.avoided_worker_ids) for one in play.fabric.requests] == [[], ["w0"]]
    assert play.count("duplane_moves_total", cause="worker_lost", outcome="moved") == 1
    assert play.count("duplane_moves_total") == 1
    assert play.runner.worker == "w1"


async def test_session_asks_for_the_model_of_its_worker_only_once_that_has_opened() -> None:
    """Before, a worker with any model may serve the session."""
    first, second, third = WorkerDouble(open=LOST), WorkerDouble(), WorkerDouble()
    async with MovedRunner.running(first, second, third) as play:
        await lose_first(play, second)
        await play.until("result")
        await play.say('{"type":"stop"}')
    needs = [dict(request.needs) for request in play.fabric.requests]
    assert needs == [{}, {}, {"model": "label"}]


@pytest.mark.parametrize(
    ("named", "needs"), [("label", {"model": "label"}), ("other", {})], ids=["its model", "another"]
)
async def test_session_that_is_lost_early_goes_on_asking_for_the_model_that_its_client_named(
    named: str, needs: dict[str, str]
) -> None:
    first, second = WorkerDouble(open=LOST), WorkerDouble()
    async with MovedRunner.running(first, second, model=named) as play:
        await play.exchange()
        await play.say('{"type":"stop"}')
    again = play.fabric.requests[1]
    assert (dict(again.needs), again.model) == (needs, "" if needs else named)


async def test_second_worker_that_is_lost_is_reported_too() -> None:
    first, second, third = WorkerDouble(), WorkerDouble(rebuild=LOST), WorkerDouble()
    async with MovedRunner.running(first, second, third) as play:
        await lose_first(play, first)
        await play.until("result")
        await play.say('{"type":"stop"}')
    assert play.fabric.unreachable == ["w0", "w1"]
    assert play.count("duplane_moves_total", outcome="failed") == 1
    assert play.count("duplane_moves_total", outcome="moved") == 1


async def test_all_workers_that_were_tried_during_one_move_are_avoided() -> None:
    first = WorkerDouble()
    others = [WorkerDouble("other") for _ in range(5)]
    async with MovedRunner.running(first, *others, WorkerDouble()) as play:
        await lose_first(play, first)
        await play.until("result")
        await play.say('{"type":"stop"}')
    avoided = [list(request.avoided_worker_ids) for request in play.fabric.requests]
    assert avoided == [[f"w{number}" for number in range(count)] for count in range(7)]
    named = [list(request.avoided_worker_incarnations) for request in play.fabric.requests]
    assert named == [[f"w{number}/1" for number in range(count)] for count in range(7)]
    assert play.fabric.unreachable == ["w0"]


async def test_later_move_avoids_only_its_own_workers() -> None:
    first, second, third = WorkerDouble(), WorkerDouble(), WorkerDouble()
    async with MovedRunner.running(first, second, third) as play:
        await lose_first(play, first)
        await play.until("result")
        await lose_first(play, second)
        await play.until("result")
        await play.say('{"type":"stop"}')
    assert [list(one.avoided_worker_ids) for one in play.fabric.requests] == [[], ["w0"], ["w1"]]


async def test_only_worker_with_another_model_is_asked_again_after_a_pause() -> None:
    first = WorkerDouble()
    other = WorkerDouble("other")
    limits = replace(Limits(), failover_s=0.6)
    async with MovedRunner.running(first, other, limits=limits) as play:
        await lose_first(play, first)
        begin_s = time.monotonic()
        await play.until("error")
        taken_s = time.monotonic() - begin_s
    assert 3 <= len(play.fabric.requests) <= 3 + taken_s / 0.25


async def test_unit_that_is_given_up_counts_as_failed() -> None:
    exporter = InMemorySpanExporter()
    telemetry = Telemetry("edge", SimpleSpanProcessor(exporter))
    first, second, third = WorkerDouble(), WorkerDouble(unit=LOST), WorkerDouble()
    async with MovedRunner.running(first, second, third, telemetry=telemetry) as play:
        await lose_first(play, first)
        await play.until("error")
        await play.exchange()
        await play.say('{"type":"stop"}')
    assert play.count("duplane_units_total", outcome="failed") == 1
    assert play.count("duplane_units_total", outcome="listen") == 2
    assert play.count("duplane_units_total", outcome="dropped") == 0
    found = [span.attributes or {} for span in exporter.get_finished_spans()]
    outcomes = [span[spans.UNIT_OUTCOME] for span in found if spans.UNIT_OUTCOME in span]
    assert outcomes == ["listen", spans.FAILED, "listen"]


async def test_unit_that_is_sent_again_is_not_overdue_at_once() -> None:
    clock = HandSetClock()
    first, second = WorkerDouble(), WorkerDouble(unit=None)
    async with MovedRunner.running(first, second, clock=clock) as play:
        await play.exchange()
        assert not play.runner.overdue_slots(0)
        first.ends["unit"] = None
        await play.chunk()
        await first.until("unit")
        await first.until("unit")
        clock.advance(3)
        assert play.runner.overdue_slots(2.9)
        play.lose_overdue()
        assert not play.runner.overdue_slots(0)
        await second.until("unit")
        assert not play.runner.overdue_slots(0)
        clock.advance(2)
        assert play.runner.overdue_slots(1.9)
        await play.say('{"type":"stop"}')


@pytest.mark.parametrize("silent", ["open", "rebuild"])
async def test_next_worker_is_left_if_it_hangs_before_it_has_rebuilt(silent: str) -> None:
    clock = HandSetClock()
    first, second, third = WorkerDouble(), WorkerDouble(), WorkerDouble()
    second.ends[silent] = None
    async with MovedRunner.running(first, second, third, clock=clock) as play:
        await lose_first(play, first)
        await second.until(silent)
        assert not play.runner.overdue_slots(0)
        clock.advance(2)
        assert play.runner.overdue_slots(1.9)
        play.lose_overdue()
        await play.until("result")
        assert not play.runner.overdue_slots(0)
        await play.say('{"type":"stop"}')
    assert play.fabric.unreachable == ["w0", "w1"]


@pytest.mark.parametrize("digest", ["m", ""])
async def test_session_that_cannot_move_waits_for_its_worker(digest: str) -> None:
    """A session cannot move if its journal is too small or its worker cannot rebuild."""
    clock = HandSetClock()
    worker = WorkerDouble(digest)
    limits = replace(Limits(), journal_bytes=40_000 if digest else 1_000_000)
    async with MovedRunner.running(worker, limits=limits, clock=clock) as play:
        await play.exchange()
        await play.exchange()
        worker.ends["unit"] = None
        await play.chunk()
        for _ in range(3):
            await worker.until("unit")
        clock.advance(30)
        assert not play.runner.overdue_slots(0)
        await play.say('{"type":"stop"}')


async def test_session_that_may_not_move_again_waits_for_its_worker() -> None:
    clock = HandSetClock()
    workers = [WorkerDouble() for _ in range(4)]
    async with MovedRunner.running(*workers, clock=clock) as play:
        for worker in workers[:3]:
            await lose_first(play, worker)
            await play.until("result")
        last = workers[3]
        last.ends["unit"] = None
        await play.chunk()
        await asyncio.wait_for(last.until("rebuild"), 5)
        await last.until("unit")
        clock.advance(15)
        assert not play.runner.overdue_slots(0)
        await play.say('{"type":"stop"}')
