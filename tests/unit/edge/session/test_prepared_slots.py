"""The runner of a session that prepares a second slot while its worker still answers."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from support.edge.moved_runner import MovedRunner, WorkerDouble
from support.fabric.real_fabric import until
from support.time_limits import WITHIN_S

from duplane.edge.settings import Limits
from duplane.fabric.monitoring import spans
from duplane.fabric.monitoring.spans import Telemetry


async def begin_unit(play: MovedRunner, first: WorkerDouble) -> None:
    """Send a second unit, which the worker does not answer."""
    await play.exchange()
    first.ends["unit"] = None
    await play.chunk()
    for _ in range(2):
        await first.until("unit")


async def test_call_to_a_draining_worker_ends_in_order() -> None:
    first, second = WorkerDouble(), WorkerDouble()
    async with MovedRunner.running(first, second) as play:
        await play.exchange()
        first.drain()
        await second.until("rebuild")
        await play.exchange()
        await second.until("unit")
        await play.say('{"type":"stop"}')
    assert (first.has_input_ended, first.is_cancelled) == (True, False)
    assert play.fabric.unreachable == []
    assert play.count("duplane_moves_total", cause="drain", outcome="moved") == 1
    assert play.count("duplane_moves_total") == 1
    assert play.runner.worker == "w1"


async def test_slot_that_cannot_be_used_delays_no_move() -> None:
    """The scheduler grants another slot of the worker that drains, and that is then lost."""
    first, same, second = WorkerDouble(), WorkerDouble(name="w0"), WorkerDouble()
    async with MovedRunner.running(first, same, second) as play:
        await play.exchange()
        play.fabric.may_release.clear()
        first.drain()
        await until_moves(play, outcome="failed")
        first.lose()
        await second.until("rebuild")
        await play.exchange()
        play.fabric.may_release.set()
        await play.say('{"type":"stop"}')
    assert play.count("duplane_moves_total", cause="worker_lost", outcome="moved") == 1
    assert play.count("duplane_moves_total") == 2
    assert play.fabric.unreachable == ["w0"]


async def until_moves(play: MovedRunner, outcome: str) -> None:
    """Wait until a move has ended so."""

    async def has_ended() -> bool:
        return play.count("duplane_moves_total", outcome=outcome) == 1

    await until(has_ended, WITHIN_S)


async def test_unexpected_error_gives_the_permit_and_the_journal_back() -> None:
    first, second = WorkerDouble(), WorkerDouble(rebuild=None)
    plays: list[MovedRunner] = []

    async def fail() -> None:
        async with MovedRunner.running(first, second) as play:
            plays.append(play)
            await play.exchange()
            first.drain()
            await second.until("rebuild")
            first.fail(RuntimeError("a fault of the program"))

    with pytest.raises(ExceptionGroup):
        await fail()
    (play,) = plays
    assert play.session.closed
    assert play.permits.free_count == Limits().rebuild_count
    assert play.space.used_bytes == 0


async def test_worker_that_hangs_after_a_move_is_found_once() -> None:
    first, second = WorkerDouble(), WorkerDouble()
    async with MovedRunner.running(first, second) as play:
        await play.exchange()
        first.lose()
        await play.exchange()
        second.ends["unit"] = None
        await play.chunk()
        for _ in range(2):
            await second.until("unit")
        assert len(play.runner.overdue_slots(0)) == 1
        await play.say('{"type":"stop"}')


async def test_prepared_slot_is_given_back_when_the_answer_comes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    first, second = WorkerDouble(), WorkerDouble(rebuild=None)
    async with MovedRunner.running(first, second) as play:
        await begin_unit(play, first)
        play.hedge()
        await second.until("rebuild")
        first.answer("unit", 1)
        await play.until("result")
        assert second.is_cancelled
        del first.ends["unit"]
        await play.exchange()
        await play.say('{"type":"stop"}')
    assert not first.is_cancelled
    assert play.count("duplane_moves_total", cause="overdue", outcome="stayed") == 1
    assert play.runner.worker == "w0"
    assert said(caplog)[-1] == "the session stays at worker w0: it has answered"


async def test_prepared_slot_is_given_back_when_the_drain_is_taken_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    first, second = WorkerDouble(), WorkerDouble(rebuild=None)
    async with MovedRunner.running(first, second) as play:
        await play.exchange()
        first.drain()
        await second.until("rebuild")
        first.undrain()
        await until_moves(play, outcome="stayed")
        await play.exchange()
        await play.say('{"type":"stop"}')
    assert (first.is_cancelled, second.is_cancelled) == (False, True)
    assert play.runner.worker == "w0"
    assert said(caplog)[-1] == "the session stays at worker w0: its drain was taken back"


async def test_call_to_a_worker_that_hangs_is_cancelled_when_the_next_one_is_ready() -> None:
    first, second = WorkerDouble(), WorkerDouble()
    async with MovedRunner.running(first, second) as play:
        await begin_unit(play, first)
        play.hedge()
        await play.until("result")
        await play.say('{"type":"stop"}')
    assert first.is_cancelled
    assert play.fabric.unreachable == [], "the worker may only be slow"
    assert play.count("duplane_moves_total", cause="overdue", outcome="moved") == 1


@pytest.mark.parametrize("silent", ["open", "rebuild"])
async def test_client_that_leaves_gives_both_slots_back(silent: str) -> None:
    first, second = WorkerDouble(), WorkerDouble()
    second.ends[silent] = None
    async with MovedRunner.running(first, second) as play:
        await play.exchange()
        first.drain()
        await second.until(silent)
        await play.say('{"type":"stop"}')
    assert (first.has_input_ended, first.is_cancelled) == (True, False)
    assert second.is_cancelled


async def test_slot_of_the_same_worker_is_not_claimed(caplog: pytest.LogCaptureFixture) -> None:
    """An overloaded worker gets no further work, and the log says that the session stays."""
    caplog.set_level(logging.INFO)
    first, same = WorkerDouble(name="w"), WorkerDouble(name="w")
    async with MovedRunner.running(first, same) as play:
        await begin_unit(play, first)
        play.hedge()
        await asyncio.wait_for(play.fabric.has_released.wait(), WITHIN_S)
        assert play.count("duplane_moves_total", cause="overdue", outcome="failed") == 1
        first.answer("unit", 1)
        await play.until("result")
        await play.say('{"type":"stop"}')
    assert not same.is_claimed
    assert play.runner.worker == "w"
    assert said(caplog) == [
        "the session prepares to leave worker w: overdue",
        "the session stays at worker w: the preparation failed",
    ]


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the lines of the log about moves."""
    lines = (record.getMessage() for record in caplog.records)
    return [line for line in lines if line.startswith("the session ")]


async def test_next_worker_that_is_lost_is_reported_and_another_one_is_prepared() -> None:
    first, second, third = WorkerDouble(), WorkerDouble(rebuild=None), WorkerDouble()
    async with MovedRunner.running(first, second, third) as play:
        await play.exchange()
        first.drain()
        await second.until("rebuild")
        second.lose()
        await third.until("rebuild")
        await play.exchange()
        await third.until("unit")
        await play.say('{"type":"stop"}')
    assert play.fabric.unreachable == ["w1"]
    avoided = [list(request.avoided_worker_ids) for request in play.fabric.requests]
    assert avoided == [[], ["w0"], ["w0", "w1"]]


async def test_slot_whose_worker_does_not_rebuild_in_time_is_given_back() -> None:
    first, second, third = WorkerDouble(), WorkerDouble(rebuild=None), WorkerDouble()
    limits = replace(Limits(), failover_s=0.1)
    async with MovedRunner.running(first, second, third, limits=limits) as play:
        await play.exchange()
        first.drain()
        await second.until("rebuild")
        await third.until("rebuild")
        assert second.is_cancelled
        await play.exchange()
        await play.say('{"type":"stop"}')
    assert play.fabric.unreachable == []
    assert play.count("duplane_moves_total", cause="drain", outcome="failed") == 1
    assert play.count("duplane_moves_total", cause="drain", outcome="moved") == 1


async def test_trace_of_a_session_that_stays_shows_no_error_and_its_own_lease() -> None:
    exporter = InMemorySpanExporter()
    telemetry = Telemetry("edge", SimpleSpanProcessor(exporter))
    first, second = WorkerDouble(), WorkerDouble(rebuild=None)
    async with MovedRunner.running(first, second, telemetry=telemetry) as play:
        await begin_unit(play, first)
        play.hedge()
        await second.until("rebuild")
        first.answer("unit", 1)
        await play.until("result")
        await play.say('{"type":"stop"}')
        (move,) = (one for one in exporter.get_finished_spans() if one.name == spans.EDGE_MOVE)
    play.spans.end("C", "client", is_failure=False)
    (session,) = (one for one in exporter.get_finished_spans() if one.name == spans.EDGE_SESSION)
    assert move.status.status_code is StatusCode.UNSET
    assert (session.attributes or {})[spans.LEASE_ID] == "lease_w0"
