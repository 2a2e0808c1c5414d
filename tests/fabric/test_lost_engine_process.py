"""Calls go on elsewhere when the engine process of their worker is killed or hangs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any

import psutil
import pytest
from support.fabric.processes import alive
from support.fabric.real_fabric import RealFabric
from support.fabric.talker import WAIT_S, talking
from support.time_limits import until

from duplane.worker.engine.engine_process import ENGINE_MODULE
from duplane.worker.models.scripted.model import Mark

pytestmark = [pytest.mark.timing, pytest.mark.slow]

UNITS = 8
WORKERS = 2
FREE = WORKERS * 2
STUCK_S, HUNG_S = 1.0, 3.0


@pytest.fixture(scope="module")
async def fabric() -> AsyncGenerator[RealFabric]:
    """A fabric of two workers with engine processes. A worker that ends is started again."""
    environment = {
        "DUPLANE_WORKERS": str(WORKERS),
        "DUPLANE_CONTINUITY": "worker",
        "DUPLANE_FAILOVER_S": str(WAIT_S),
        "DUPLANE_ENGINE_PROCESS": "on",
        "DUPLANE_STUCK_AFTER_S": str(STUCK_S),
        "DUPLANE_HUNG_AFTER_S": str(HUNG_S),
    }
    async with RealFabric.running("scripted", **environment) as fabric:
        yield fabric


def engine_of(worker: psutil.Process) -> psutil.Process:
    (engine,) = (one for one in worker.children() if ENGINE_MODULE in one.cmdline())
    return engine


async def events_of(
    fabric: RealFabric, disturb: Callable[[psutil.Process], None] | None = None
) -> tuple[list[dict[str, Any]], list[psutil.Process]]:
    """Return the events of a session whose engine process is disturbed while it has a unit.

    The processes are the worker of this time and its engine process.
    """
    processes: list[psutil.Process] = []
    async with talking(fabric, FREE) as client:
        for number in range(UNITS):
            if disturb and number == UNITS // 2:
                worker = await client.worker()
                processes += [worker, engine_of(worker)]
                disturb(processes[1])
            await client.exchange()
    return client.events, processes


async def gone(processes: list[psutil.Process]) -> None:
    async def are_gone() -> bool:
        return not alive(processes)

    await until(are_gone, WAIT_S)


@pytest.mark.parametrize("disturb", [psutil.Process.kill, psutil.Process.suspend])
async def test_no_unit_is_lost_with_the_engine_process(
    fabric: RealFabric, disturb: Callable[[psutil.Process], None]
) -> None:
    undisturbed, _ = await events_of(fabric)
    assert len(undisturbed) == 2 + UNITS + 1
    told = len(fabric.log)
    events, processes = await events_of(fabric, disturb)
    assert events == undisturbed
    await gone(processes)

    async def is_told() -> bool:
        return "the device is lost, and with it this worker" in "".join(fabric.log[told:])

    await until(is_told, WAIT_S)


async def test_unit_that_hangs_two_engine_processes_is_refused_and_the_session_goes_on(
    fabric: RealFabric,
) -> None:
    async with talking(fabric, FREE) as client:
        before = await client.exchange()
        await client.send_mark(Mark.HUNG_DEVICE)
        assert (await client.receive())["type"] == "error"
        after = await client.exchange()
        assert after["kv_cache_length"] == before["kv_cache_length"] + 12


async def test_worker_that_is_killed_takes_its_engine_process_with_it(fabric: RealFabric) -> None:
    undisturbed, _ = await events_of(fabric)
    processes: list[psutil.Process] = []

    def kill_worker(engine: psutil.Process) -> None:
        processes.append(engine)
        worker = engine.parent()
        assert worker
        worker.kill()

    events, _ = await events_of(fabric, kill_worker)
    assert events == undisturbed
    await gone(processes)
