"""The pool of threads that sessions share: in turns, since each has one piece of work at a time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator
from concurrent.futures import CancelledError

import pytest
from support.time_limits import WITHIN_S

from duplane.worker.engine.fair_pool import FairPool, PoolFullError
from duplane.worker.engine.preparation import Preparation


class Gate:
    """Work that waits until the test lets it end."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.may_end = threading.Event()

    def __call__(self) -> str:
        self.begun.release()
        assert self.may_end.wait(WITHIN_S)
        return "done"


def test_a_pool_runs_work_in_its_threads_and_returns_results_and_errors() -> None:
    pool = FairPool(2, "few", 10)
    gate = Gate()
    held = [pool.submit("A", gate) for _ in range(2)]
    for _ in held:
        assert gate.begun.acquire(timeout=WITHIN_S)
    waiting = pool.submit("B", lambda: threading.current_thread().name)
    failing = pool.submit("B", lambda: 1 // 0)
    assert not waiting.done()
    gate.may_end.set()
    assert [future.result(WITHIN_S) for future in held] == ["done"] * 2
    assert waiting.result(WITHIN_S).startswith("few")
    assert isinstance(failing.exception(WITHIN_S), ZeroDivisionError)
    # The threads have found no more work; the pool goes on.
    assert pool.submit("A", lambda: 3).result(WITHIN_S) == 3
    pool.stop()


def test_work_that_waits_is_dropped_with_its_session_and_with_the_pool() -> None:
    pool = FairPool(1, "one", 3)
    gate = Gate()
    held = pool.submit("A", gate)
    assert gate.begun.acquire(timeout=WITHIN_S)
    ran: list[str] = []
    left, kept, other = (pool.submit(name, lambda n=name: ran.append(n)) for name in "BCD")
    with pytest.raises(PoolFullError):
        pool.submit("E", gate)
    pool.drop("B")
    assert left.cancelled()
    assert kept.cancel()
    gate.may_end.set()
    assert held.result(WITHIN_S) == "done"
    other.result(WITHIN_S)
    assert ran == ["D"]
    with pytest.raises(CancelledError):
        kept.result(0)
    pool.stop()
    with pytest.raises(RuntimeError, match="stopped"):
        pool.submit("A", gate)


def test_a_pool_that_stops_cancels_what_waits() -> None:
    pool = FairPool(1, "one", 3)
    gate = Gate()
    held = pool.submit("A", gate)
    assert gate.begun.acquire(timeout=WITHIN_S)
    waiting = pool.submit("A", gate)
    pool.stop()
    assert waiting.cancelled()
    gate.may_end.set()
    assert held.result(WITHIN_S) == "done"


async def test_a_session_with_much_work_delays_another_by_one_piece() -> None:
    pool = FairPool(1, "one", 100)
    gate = Gate()
    held = pool.submit("A", gate)
    assert gate.begun.acquire(timeout=WITHIN_S)
    greedy, modest = Preparation(), Preparation()
    done: list[str] = []

    def steps(name: str) -> Generator[None, None, str]:
        for number in range(4):
            done.append(f"{name}{number}")
            yield
        return name

    running = [asyncio.create_task(greedy.run_steps(pool, steps(name))) for name in "gh"]
    running.append(asyncio.create_task(modest.run(pool, lambda: done.append("m") or "m")))
    asyncio.get_running_loop().call_soon(gate.may_end.set)  # all three have begun then
    assert await asyncio.gather(*running) == ["g", "h", "m"]
    assert done.index("m") == 1, "the other steps of the first session come later"
    assert held.result(WITHIN_S) == "done"
    pool.stop()
