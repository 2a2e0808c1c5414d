"""The watch that finds workers that hang."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.time_limits import WITHIN_S

from duplane.edge import hang_watch
from duplane.edge.hang_watch import HangWatch
from duplane.edge.session.slot import Slot
from duplane.fabric.v1 import lease_pb2

GRANTED = lease_pb2.Granted(worker_id="w", worker_address="w:1")


class Runner:
    """A session that waits for worker "w"."""

    def __init__(self, waited_s: float) -> None:
        self.slot = Slot(GRANTED)
        self.waited_s = waited_s
        self.is_hedged = asyncio.Event()
        self.is_lost = asyncio.Event()

    def overdue_slots(self, overdue_s: float) -> list[Slot]:
        return [self.slot] if self.waited_s > overdue_s else []

    def hedge(self, slot: Slot) -> None:
        assert slot is self.slot
        self.is_hedged.set()

    def lose(self, slot: Slot) -> None:
        assert slot is self.slot
        self.waited_s = 0.0
        self.is_lost.set()


class ScriptedHealth:
    """Answers health checks of workers with `answers` in order, then repeats the last answer."""

    def __init__(self, *answers: bool | Exception) -> None:
        self.check_count = 0
        self.unreachable: list[str] = []
        self._answers = answers

    async def is_alive(self, worker_address: str, within_s: float) -> bool:
        del worker_address, within_s
        answer = self._answers[min(self.check_count, len(self._answers) - 1)]
        self.check_count += 1
        if isinstance(answer, Exception):
            raise answer
        return answer

    def report_unreachable(self, granted: lease_pb2.Granted) -> None:
        self.unreachable.append(granted.worker_id)


@contextlib.asynccontextmanager
async def watching(health: ScriptedHealth, *runners: Runner) -> AsyncGenerator[None]:
    """Run a `HangWatch` during the body of the `with`; a session is overdue after 20 ms."""
    watch = HangWatch(lambda: cast("Any", runners), cast("Any", health), 0.02)
    task = asyncio.create_task(watch.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()


async def test_one_check_moves_all_overdue_sessions_of_a_worker(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runners = Runner(5.0), Runner(5.0)
    on_time, health = Runner(0.0), ScriptedHealth(False)
    async with watching(health, *runners, on_time), asyncio.timeout(WITHIN_S):
        for runner in runners:
            await runner.is_lost.wait()
    assert health.check_count == 1
    assert health.unreachable == ["w"]
    assert "worker w at w:1 hangs" in caplog.text
    assert not on_time.is_lost.is_set()
    assert not on_time.is_hedged.is_set()


async def test_session_prepares_another_worker_although_its_own_is_only_slow() -> None:
    runner, health = Runner(5.0), ScriptedHealth(True)
    async with watching(health, runner), asyncio.timeout(WITHIN_S):
        await runner.is_hedged.wait()
    assert not runner.is_lost.is_set()
    assert health.unreachable == []


async def test_watch_goes_on_after_an_error(caplog: pytest.LogCaptureFixture) -> None:
    runner, health = Runner(5.0), ScriptedHealth(RuntimeError("broken"), False)
    with caplog.at_level(logging.ERROR):
        async with watching(health, runner), asyncio.timeout(WITHIN_S):
            await runner.is_lost.wait()
    assert health.check_count == 2
    assert "broken" in caplog.text


async def test_sessions_are_not_overdue_if_this_process_had_no_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Answers that arrived meanwhile are read before the next check for overdue sessions."""
    clock_s, looked = itertools.count(0.0, 60.0), asyncio.Event()
    stalled = SimpleNamespace(monotonic=lambda: looked.set() or next(clock_s))
    runner, health = Runner(5.0), ScriptedHealth(True)
    monkeypatch.setattr(hang_watch, "time", stalled)
    async with watching(health, runner), asyncio.timeout(WITHIN_S):
        for _ in range(4):
            looked.clear()
            await looked.wait()
        assert not runner.is_hedged.is_set()
        monkeypatch.undo()
        await runner.is_hedged.wait()
