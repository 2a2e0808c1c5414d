"""The watch of an engine, on a clock of its own."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from support.worker.scripted_model import ScriptedModel

from duplane.worker.engine import engine
from duplane.worker.engine.device_thread import DeviceThread
from duplane.worker.models.interface import DeviceLostError
from duplane.worker.settings import WorkerSettings

STUCK_S, HUNG_S = 0.04, 120.0


def watched(monkeypatch: pytest.MonkeyPatch, times_s: list[float]) -> DeviceThread:
    """Return an engine that ends when the clock has shown all of `times_s`."""
    thread = DeviceThread(ScriptedModel(), WorkerSettings(checkpoint="scripted"))
    thread.ended = asyncio.get_running_loop().create_future()
    times = iter(times_s)

    def monotonic() -> float:
        now_s = next(times)
        if now_s == times_s[-1] and not thread.ended.done():
            thread.ended.set_result(None)
        return now_s

    monkeypatch.setattr(engine, "time", SimpleNamespace(monotonic=monotonic))
    return thread


async def no_call(is_stuck: bool) -> None:
    raise AssertionError(is_stuck)


async def test_worker_that_was_stopped_does_not_blame_its_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    thread = watched(monkeypatch, [0.0, 0.01, 0.01, 0.02, 150.0])
    thread.busy_since_s = 0.0  # as the last report before the stop says
    await thread.watch(STUCK_S, HUNG_S, no_call)


async def test_call_that_has_not_returned_is_a_lost_device(monkeypatch: pytest.MonkeyPatch) -> None:
    thread = watched(monkeypatch, [150.0, 150.01, 150.02, 151.0])
    thread.busy_since_s = 0.0
    with pytest.raises(DeviceLostError, match="has not returned for 150 s"):
        await thread.watch(STUCK_S, HUNG_S, no_call)
