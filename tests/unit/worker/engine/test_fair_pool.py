"""The order of work that sessions share, and the pool of threads that runs it."""

from __future__ import annotations

import threading
from collections import defaultdict
from concurrent.futures import CancelledError
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.time_limits import WITHIN_S

from duplane.worker.engine.fair_pool import FairOrder, FairPool, PoolFullError

SESSIONS = st.sampled_from("ABCDE")
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), SESSIONS),
        st.tuples(st.just("take"), st.none()),
        st.tuples(st.just("done"), SESSIONS),
        st.tuples(st.just("drop"), SESSIONS),
    ),
    max_size=200,
)


@given(EVENTS, st.integers(1, 20))
def test_the_order_is_fair_among_sessions_and_fifo_within_one(
    events: list[tuple[str, str | None]], capacity: int
) -> None:
    order: FairOrder[int] = FairOrder(capacity)
    waiting: dict[str | None, list[int]] = defaultdict(list)
    running: dict[str | None, int] = defaultdict(int)
    passed: dict[str | None, int] = defaultdict(int)  # takes since a waiting session's last turn
    for number, (event, session) in enumerate(events):
        count = sum(map(len, waiting.values()))
        if event == "put" and count == capacity:
            with pytest.raises(PoolFullError):
                order.put(session, number)
        elif event == "put":
            order.put(session, number)
            waiting[session].append(number)
        elif event == "drop":
            assert order.drop(session) == waiting.pop(session, [])
            passed.pop(session, None)
        elif event == "done" and running[session]:
            order.done(session)
            running[session] -= 1
        elif event == "take":
            taken = order.take()
            assert (taken is None) == (count == 0)
            if taken is None:
                continue
            owner, work = str(taken[0]), taken[1]
            assert work == waiting[owner].pop(0)
            # Nobody who waits runs less than the session that was chosen.
            others = [name for name, own in waiting.items() if own and name != owner]
            assert all(running[owner] <= running[name] for name in others)
            running[owner] += 1
            passed.pop(owner, None)
            for name in others:
                # A session without running work waits for at most one turn of each other one.
                passed[name] = 0 if running[name] else passed[name] + 1
                assert passed[name] <= 4
    assert sorted(order.drop_all()) == sorted(chain.from_iterable(waiting.values()))
    assert order.take() is None


def test_a_session_with_much_work_delays_another_by_one_piece() -> None:
    order: FairOrder[str] = FairOrder(100)
    for number in range(16):
        order.put("greedy", f"g{number}")
    taken = [order.take()]
    order.put("modest", "m0")
    order.done("greedy")
    taken += [order.take(), order.take()]
    assert taken == [("greedy", "g0"), ("greedy", "g1"), ("modest", "m0")]


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
