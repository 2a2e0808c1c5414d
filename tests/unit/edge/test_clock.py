"""The clock of the edge never calls early: after an early call, the caller would wait again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import uvloop
from support.slept_loop import SleptLoop

from duplane.edge.clock import LoopClock


async def called_late_s(clock: LoopClock, delay_s: float) -> float:
    """Return how long after the due time the clock has called."""
    called = asyncio.Event()
    due_s = clock.now().monotonic_s + delay_s
    clock.call_at(due_s, called.set)
    await called.wait()
    return clock.now().monotonic_s - due_s


@pytest.mark.parametrize("loop", [uvloop.new_event_loop, SleptLoop])
def test_clock_never_calls_early(loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def call_often() -> list[float]:
        clock = LoopClock()
        delays = [0.002 + step * 0.0001 for step in range(40)]
        return [await called_late_s(clock, delay_s) for delay_s in delays]

    with asyncio.Runner(loop_factory=loop) as runner:
        assert min(runner.run(call_often())) >= 0.0


async def test_cancelled_call_is_not_made() -> None:
    clock = LoopClock()
    calls = list[str]()
    last = asyncio.Event()
    due_s = clock.now().monotonic_s + 0.002
    clock.call_at(due_s, lambda: calls.append("cancelled")).cancel()
    clock.call_at(due_s + 0.001, lambda: calls.append("called"))
    clock.call_at(due_s + 0.005, last.set)
    await last.wait()
    assert calls == ["called"]
