"""The engine process and its worker: each may be killed, frozen or signalled at any time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.fabric.in_process import LocalWorker
from support.fabric.processes import alive
from support.time_limits import WITHIN_S, until
from support.worker.engines import OPTIONS, Caller, new_engine
from support.worker.fake_scheduler import FakeScheduler

from duplane.fabric.process import FatalError, StartError
from duplane.worker.engine.engine_process import ENGINE_MODULE, EngineProcess
from duplane.worker.models.interface import DeviceLostError
from duplane.worker.models.scripted.model import Mark

pytestmark = pytest.mark.timing

STUCK_S, HUNG_S = 1.0, 4.0
FAMILY = {"checkpoint": Path(__file__).parent, "family": "support.failing_family"}
# A worker's process, which only has an engine. It prints the id of the engine process.
OWNER = """
import asyncio, sys
from support.worker.engines import Caller, new_engine

async def main():
    engine = new_engine("process")
    await engine.start()
    print(engine.process_id, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@contextlib.asynccontextmanager
async def started(**settings: Any) -> AsyncGenerator[tuple[EngineProcess, psutil.Process]]:
    """Start an engine process, and assert that it is gone at the end."""
    engine = new_engine("process", **settings)
    assert isinstance(engine, EngineProcess)
    try:
        await engine.start()
        process = psutil.Process(engine.process_id)
        yield engine, process
    finally:
        await engine.stop()
    assert not alive([process])


class Watch:
    """The watch of an engine, and the calls of `on_stuck` so far."""

    def __init__(self, engine: EngineProcess) -> None:
        self.calls = asyncio.Queue[bool]()
        self.task = asyncio.create_task(engine.watch(STUCK_S, HUNG_S, self.calls.put))

    async def is_stuck(self) -> bool:
        async with asyncio.timeout(WITHIN_S):
            return await self.calls.get()

    async def loss(self) -> str:
        """Wait until the device is lost; return the message."""
        await asyncio.wait({self.task}, timeout=WITHIN_S)
        error = self.task.exception()
        assert isinstance(error, DeviceLostError)
        return str(error)


async def opened(engine: EngineProcess) -> Caller:
    caller = Caller(engine)
    engine.open(caller.channel, await engine.prepare_conversation(caller.channel, OPTIONS))
    await caller.event()
    return caller


async def test_killed_process_is_a_lost_device(caplog: pytest.LogCaptureFixture) -> None:
    async with started() as (engine, process):
        watch = Watch(engine)
        caller = await opened(engine)
        process.kill()
        assert await watch.loss() == "the engine process has ended"
        await caller.send()  # without effect
    assert "the engine process has ended with the exit code -9" in caplog.text


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        (Mark.LOST_DEVICE, "RuntimeError: a unit was marked to lose the device"),
        (Mark.KILLED_WORKER, "the engine process has ended"),
    ],
)
async def test_unit_that_loses_the_device_ends_the_process(mark: Mark, message: str) -> None:
    async with started() as (engine, _):
        watch = Watch(engine)
        caller = await opened(engine)
        await caller.send(mark.value)
        assert await watch.loss() == message


async def test_frozen_process_is_stuck_until_it_runs_again() -> None:
    async with started(stuck_after_s=STUCK_S, hung_after_s=HUNG_S) as (engine, process):
        watch = Watch(engine)
        caller = await opened(engine)
        process.suspend()
        assert await watch.is_stuck()
        process.resume()
        assert not await watch.is_stuck()
        await caller.send()
        await caller.answer()
        assert await engine.close(caller.channel)
        watch.task.cancel()


async def test_process_that_stays_frozen_is_a_lost_device() -> None:
    async with started(stuck_after_s=STUCK_S, hung_after_s=HUNG_S) as (engine, process):
        watch = Watch(engine)
        process.suspend()
        assert await watch.is_stuck()
        assert "has not returned for" in await watch.loss()


async def test_call_that_does_not_return_is_stuck_and_then_a_lost_device() -> None:
    async with started(stuck_after_s=STUCK_S, hung_after_s=HUNG_S) as (engine, _):
        watch = Watch(engine)
        caller, other = await opened(engine), Caller(engine, 1)
        await caller.send(Mark.HUNG_DEVICE.value)
        assert await watch.is_stuck()
        assert other.events.empty()
        assert "has not returned for" in await watch.loss()


async def test_signals_of_the_worker_do_not_reach_the_process() -> None:
    async with started() as (engine, process):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            process.send_signal(number)
        process.send_signal(signal.SIGUSR2)
        async with Caller.open(engine) as caller:
            await caller.send()
            await caller.answer()
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()), "this process still gets them"


async def test_process_writes_no_core_dumps_and_has_no_socket_of_the_worker() -> None:
    before = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, before[1]))
    try:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            listening.set_inheritable(True)
            async with started() as (_, process):
                assert process.rlimit(psutil.RLIMIT_CORE)[0] == 0
                assert not process.net_connections("inet")
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, before)


@pytest.mark.parametrize("is_frozen", [False, True])
async def test_death_of_the_worker_ends_the_process_at_once(is_frozen: bool) -> None:
    owner = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", OWNER),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
    )
    assert owner.stdout
    process = psutil.Process(int(await owner.stdout.readline()))
    if is_frozen:  # it cannot notice the end of the connection, as with a call that holds the GIL
        process.suspend()
    owner.kill()
    await owner.wait()

    async def is_gone() -> bool:
        return not alive([process])

    await until(is_gone, 1.0)


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        ("refused", StartError, "the checkpoint is refused"),
        ("broken", RuntimeError, "a fault of the program"),
        ("gone", RuntimeError, "the engine process has ended"),
    ],
)
async def test_model_that_cannot_be_loaded_ends_the_worker(
    fault: str, kind: type[Exception], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "duplane")
    worker = LocalWorker(None, engine_process="on", pool=fault, schedulers=("[::1]:1",), **FAMILY)
    await asyncio.wait({worker.task}, timeout=WITHIN_S)
    error = worker.task.exception()
    assert type(error) is kind
    assert str(error) == message
    if fault != "gone":  # its last messages may be lost
        assert f"tries {fault}" in caplog.text
        assert "a detail of" not in caplog.text
    if fault == "broken":
        (record,) = [each for each in caplog.records if each.levelno == logging.ERROR]
        assert record.name == "duplane.worker.engine.engine_child"
        assert "RuntimeError: a fault of the program" in (record.exc_text or "")


async def test_worker_that_is_ended_while_it_loads_leaves_no_process() -> None:
    others = psutil.Process().children()  # of fixtures of other tests
    worker = LocalWorker(None, engine_process="on", pool="", schedulers=("[::1]:1",), **FAMILY)
    found: list[psutil.Process] = []

    async def is_there() -> bool:
        children = set(psutil.Process().children()) - set(others)
        found[:] = [one for one in children if ENGINE_MODULE in one.cmdline()]
        return bool(found)

    await until(is_there, WITHIN_S)
    await worker.drain()
    assert not alive(found)


async def test_worker_whose_engine_process_is_killed_ends_as_with_a_lost_device(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scheduler = FakeScheduler()
    await scheduler.start()
    address = scheduler.address
    others = psutil.Process().children()  # of fixtures of other tests
    worker = LocalWorker(None, engine_process="on", checkpoint="scripted", schedulers=(address,))
    await scheduler.until(lambda: bool(scheduler.registers))
    (process,) = set(psutil.Process().children()) - set(others)
    process.kill()
    await asyncio.wait({worker.task}, timeout=WITHIN_S)
    assert isinstance(worker.task.exception(), FatalError)
    assert "the device failed: the engine process has ended" in caplog.text
    await scheduler.stop()
