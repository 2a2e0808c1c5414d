"""`duplane trace` names the move for which a late unit has waited."""

from __future__ import annotations

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, Sampler
from support.edge.live_edge import HandSetClock
from support.edge.moved_runner import MovedRunner, WorkerDouble

from duplane.fabric.monitoring.spans import Telemetry
from duplane.tools.trace.units import Collected
from duplane.tools.trace.views import Choice, report

MOVED = "the session moved from w0 to w1 (worker_lost), rebuilt in 1500.0 ms"


async def moved(sampler: Sampler) -> str:
    """Return the report of a session that loses a worker with one unit, and waits with another."""
    exporter, clock = InMemorySpanExporter(), HandSetClock()
    telemetry = Telemetry("edge", SimpleSpanProcessor(exporter), sampler)
    first, second = WorkerDouble(), WorkerDouble(rebuild=None)
    async with MovedRunner.running(first, second, clock=clock, telemetry=telemetry) as play:
        await play.exchange()
        first.ends["unit"] = None
        await play.chunk()
        for _ in range(2):
            await first.until("unit")
        clock.advance(0.5)
        first.lose()
        await second.until("rebuild")
        await play.chunk()
        clock.advance(1.5)
        second.answer("rebuild")
        for _ in range(2):
            await play.until("result")
        await play.exchange()
        await play.say('{"type":"stop"}')
    play.spans.end("C", "client", is_failure=False)
    return reported(exporter)


def reported(exporter: InMemorySpanExporter) -> str:
    """Return the report of the session "s" from its exported spans."""
    collected = Collected(limit=100)
    collected.add(encode_spans(exporter.get_finished_spans()))
    return report(collected, Choice("s"))


@pytest.mark.parametrize("sampler", [ALWAYS_ON, ALWAYS_OFF])
async def test_late_units_name_the_move(sampler: Sampler) -> None:
    shown = await moved(sampler)
    verdicts = [line.split(": ", 1)[1] for line in shown.splitlines() if " ms  s unit " in line]
    late = [line for line in verdicts if line.startswith("late")]
    assert [line.split(" (usually")[0] for line in late[:1]] == [
        f"late, edge move 2000.0 ms: {MOVED}"
    ]
    assert late[1].startswith("late, edge queue 1500.0 ms")
    assert late[1].endswith(f": {MOVED}")
    assert len(late) == 2


async def test_session_shows_an_attempt_that_was_not_needed() -> None:
    exporter = InMemorySpanExporter()
    telemetry = Telemetry("edge", SimpleSpanProcessor(exporter), ALWAYS_ON)
    first, second = WorkerDouble(), WorkerDouble(rebuild=None)
    async with MovedRunner.running(first, second, telemetry=telemetry) as play:
        first.ends["unit"] = None
        await play.chunk()
        await first.until("unit")
        play.hedge()
        await second.until("rebuild")
        first.answer("unit", 0)
        await play.until("result")
        await play.say('{"type":"stop"}')
    (step,) = [line for line in reported(exporter).splitlines() if line.startswith("edge.move")]
    assert step.endswith("|  from w0 to w1 (overdue): stayed")


async def test_session_shows_the_move_among_its_steps() -> None:
    shown = await moved(ALWAYS_ON)
    (step,) = [line for line in shown.splitlines() if line.startswith("edge.move")]
    assert step.endswith("|  from w0 to w1 (worker_lost), rebuilt in 1500.0 ms")
