"""The pool of threads that sessions share: in turns, since each has one piece of work at a time."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Generator
from concurrent.futures import CancelledError

import pytest
from support.time_limits import WITHIN_S

from duplane.worker.engine.preparation import FairPool, PoolFullError, Preparation


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
    held = [pool.submit(gate) for _ in range(2)]
    for _ in held:
        assert gate.begun.acquire(timeout=WITHIN_S)
    waiting = pool.submit(lambda: threading.current_thread().name)
    failing = pool.submit(lambda: 1 // 0)
    assert not waiting.done()
    gate.may_end.set()
    assert [future.result(WITHIN_S) for future in held] == ["done"] * 2
    assert waiting.result(WITHIN_S).startswith("few")
    assert isinstance(failing.exception(WITHIN_S), ZeroDivisionError)
    # The threads have found no more work; the pool goes on.
    assert pool.submit(lambda: 3).result(WITHIN_S) == 3
    pool.stop()


def test_cancelled_work_frees_its_place_and_its_data() -> None:
    pool = FairPool(1, "one", 3)
    gate, dropped = Gate(), Gate()
    data = weakref.ref(dropped)
    held = pool.submit(gate)
    assert gate.begun.acquire(timeout=WITHIN_S)
    ran: list[str] = []
    left, kept = pool.submit(dropped), pool.submit(lambda: ran.append("kept"))
    pool.submit(lambda: ran.append("other"))
    with pytest.raises(PoolFullError):
        pool.submit(gate)
    del dropped
    assert left.cancel()
    assert data() is None, "the thread is busy, so it has not come to the cancelled work"
    last = pool.submit(lambda: ran.append("last"))
    assert kept.cancel()
    gate.may_end.set()
    assert held.result(WITHIN_S) == "done"
    last.result(WITHIN_S)
    assert ran == ["other", "last"]
    with pytest.raises(CancelledError):
        kept.result(0)
    pool.stop()
    with pytest.raises(RuntimeError, match="shutdown"):
        pool.submit(gate)


def test_a_pool_that_stops_cancels_what_waits() -> None:
    pool = FairPool(1, "one", 3)
    gate = Gate()
    held = pool.submit(gate)
    assert gate.begun.acquire(timeout=WITHIN_S)
    waiting = pool.submit(gate)
    pool.stop()
    assert waiting.cancelled()
    gate.may_end.set()
    assert held.result(WITHIN_S) == "done"


async def test_a_session_with_much_work_delays_another_by_one_piece() -> None:
    pool = FairPool(1, "one", 100)
    gate = Gate()
    held = pool.submit(gate)
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
