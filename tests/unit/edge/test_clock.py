"""The clock of the edge never calls early: after an early call, the caller would wait again."""

from __future__ import annotations

import asyncio

import uvloop

from duplane.edge.clock import LoopClock


async def called_late_s(clock: LoopClock, delay_s: float) -> float:
    """Return how long after the due time the clock has called."""
    called = asyncio.Event()
    due_s = clock.now().monotonic_s + delay_s
    clock.call_at(due_s, called.set)
    await called.wait()
    return clock.now().monotonic_s - due_s


def test_clock_never_calls_early() -> None:
    async def call_often() -> list[float]:
        clock = LoopClock()
        delays = [0.002 + step * 0.0001 for step in range(40)]
        return [await called_late_s(clock, delay_s) for delay_s in delays]

    assert min(uvloop.run(call_often())) >= 0.0
