"""What probes see of each role: while it starts, serves, waits for its parts, and drains."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from support.edge.live_edge import begin, end, exchange
from support.edge.scripted_fabric import ScriptedFabric
from support.monitoring.probes import codes, health_url, probed
from support.ports import free_ports
from support.time_limits import WITHIN_S, until
from support.worker.scripted_model import ScriptedModel
from support.worker.worker_harness import running_worker, unit
from websockets.asyncio.client import connect

from duplane.edge import server as edge
from duplane.edge.settings import EdgeSettings
from duplane.fabric.process import Shutdown
from duplane.scheduler import service as scheduler
from duplane.scheduler.settings import SchedulerSettings
from duplane.scheduler.store.etcd import session
from duplane.worker.models.interface import Model, Preparer

HERE = "127.0.0.1:0"


@pytest.fixture(autouse=True)
def _log_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


@contextlib.asynccontextmanager
async def serving(
    serve: Callable[[Any, Shutdown], Any], settings: Any, caplog: pytest.LogCaptureFixture
) -> AsyncGenerator[tuple[str, Shutdown]]:
    """Run a process in this one; yield the address of its probes. The body may drain it."""
    shutdown = Shutdown()
    async with asyncio.timeout(WITHIN_S), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(serve(settings, shutdown))
        await until(lambda: _true(health_url(caplog)), WITHIN_S)
        yield health_url(caplog), shutdown
        shutdown.drain()
        await running


async def _true(value: object) -> bool:
    return bool(value)


async def until_probes(url: str, expected: dict[str, int]) -> None:
    async def is_so() -> bool:
        return await probed(url) == expected

    await until(is_so, WITHIN_S)


async def test_edge_without_workers_is_ready(caplog: pytest.LogCaptureFixture) -> None:
    (nobody,) = free_ports(1)
    settings = EdgeSettings(listen=HERE, health_listen=HERE, schedulers=(f"127.0.0.1:{nobody}",))
    async with serving(edge.serve, settings, caplog) as (url, _):
        await until_probes(url, codes(live=True, ready=True))


async def test_edge_that_drains_is_not_ready_and_serves_its_session(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    announced: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    monkeypatch.setattr(edge, "announce", lambda _, address: announced.set_result(address))
    async with ScriptedFabric.running() as fabric:
        settings = EdgeSettings(listen=HERE, health_listen=HERE, schedulers=(fabric.scheduler,))
        async with (
            serving(edge.serve, settings, caplog) as (url, shutdown),
            connect(f"ws://{await announced}/v1/realtime?mode=audio", proxy=None) as client,
        ):
            await begin(client)
            assert await probed(url) == codes(live=True, ready=True)
            shutdown.drain()
            assert await probed(url) == codes(live=True, ready=False)
            await exchange(client)
            await end(client)
        await fabric.settled()


async def test_scheduler_without_its_store_lives_and_is_not_ready(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "PRESENCE_TTL_S", 1)
    monkeypatch.setattr(session, "ABSENCE_LIMIT_S", 0.1)
    (nobody,) = free_ports(1)
    settings = SchedulerSettings(
        listen=HERE, health_listen=HERE, store=f"etcd://127.0.0.1:{nobody}"
    )
    async with serving(scheduler.serve, settings, caplog) as (url, _):
        await until_probes(url, codes(live=True, ready=False))


async def test_scheduler_is_ready_once_it_serves(caplog: pytest.LogCaptureFixture) -> None:
    settings = SchedulerSettings(listen=HERE, health_listen=HERE)
    async with serving(scheduler.serve, settings, caplog) as (url, _):
        await until_probes(url, codes(live=True, ready=True))


class SlowModel(ScriptedModel):
    """A model whose load waits for `let_go`."""

    def load(self) -> tuple[Preparer, Model]:
        self._gate.wait(WITHIN_S)
        return super().load()


async def test_worker_has_not_started_until_its_model_is_loaded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = SlowModel()
    model.hold()
    seen: list[dict[str, int]] = []

    async def watch() -> None:
        await until(lambda: _true(health_url(caplog)), WITHIN_S)
        seen.append(await probed(health_url(caplog)))
        model.let_go()

    watching = asyncio.create_task(watch())
    async with running_worker(model, health_listen=HERE):
        await watching
        assert seen == [codes(live=True, ready=False, started=False)]
        assert await probed(health_url(caplog)) == codes(live=True, ready=True)


async def test_worker_that_drains_is_not_ready_and_serves_its_session(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running_worker(health_listen=HERE) as rig, rig.opened() as client:
        url = health_url(caplog)
        assert await probed(url) == codes(live=True, ready=True)
        rig.shutdown.drain()
        assert await probed(url) == codes(live=True, ready=False)
        await client.send(unit(0))
        await client.leaving()
        assert (await client.delta()).sequence == 0
        await client.close()
        await client.closed()


@pytest.mark.timing
async def test_worker_whose_device_does_not_answer_does_not_live(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with (
        running_worker(health_listen=HERE, stuck_after_s=0.5, hung_after_s=600.0) as rig,
        rig.opened() as client,
    ):
        url = health_url(caplog)
        rig.model.hold()
        await client.send(unit(0))
        await until_probes(url, codes(live=False, ready=False))
        rig.model.let_go()
        await until_probes(url, codes(live=True, ready=True))
