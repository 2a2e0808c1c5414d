"""The edge and the worker in the test's process. `SchedulerHarness` runs the scheduler there."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from pathlib import Path
from typing import Any

from support.time_limits import WITHIN_S

from duplane.edge.access import Authenticator
from duplane.edge.clock import Clock
from duplane.edge.server import Edge
from duplane.edge.settings import EdgeSettings
from duplane.fabric.client import FabricClient
from duplane.fabric.errors import FabricError
from duplane.fabric.monitoring.spans import Telemetry
from duplane.fabric.process import Shutdown
from duplane.worker.models.interface import Device
from duplane.worker.service import serve
from duplane.worker.settings import WorkerSettings


@contextlib.asynccontextmanager
async def running_edge(
    *schedulers: str,
    telemetry: Telemetry | None = None,
    clock: Clock | None = None,
    authenticator: Authenticator | None = None,
    **settings: Any,
) -> AsyncGenerator[Edge]:
    """Run an edge at a free port; at the end, end its sessions."""
    edge_settings = EdgeSettings(listen="127.0.0.1:0", schedulers=schedulers, **settings)
    telemetry = telemetry or Telemetry("edge")
    async with (
        FabricClient(edge_settings.schedulers) as client,
        Edge.listening(edge_settings, client, telemetry, clock, authenticator) as edge,
    ):
        yield edge


class LocalWorker:
    """A running worker. `device` None means the model of the checkpoint in the settings."""

    def __init__(
        self, device: Device | None, telemetry: Telemetry | None = None, **settings: Any
    ) -> None:
        self.shutdown = Shutdown()
        worker_settings = WorkerSettings(**{"checkpoint": Path("/nowhere"), **settings})
        serving = serve(worker_settings, self.shutdown, device, telemetry)
        self.task = asyncio.create_task(serving)

    async def drain(self) -> None:
        """Drain the worker, and wait for its end."""
        self.shutdown.drain()
        async with asyncio.timeout(WITHIN_S):
            await self.task

    async def cancel(self) -> None:
        """End the worker at once, if it still runs."""
        self.task.cancel()
        await asyncio.wait({self.task})


@contextlib.contextmanager
def no_task_left(folder: str) -> Generator[None]:
    """Assert at the end of the body that no task is left that runs code of this folder.

    Other tasks, such as those of gRPC, may end a little later.
    """
    before = asyncio.all_tasks()
    yield
    after = asyncio.all_tasks() - before
    codes = {task: getattr(task.get_coro(), "cr_code", None) for task in after}
    left = [task for task, code in codes.items() if code and folder in code.co_filename]
    assert not left, left


async def failure_of(read: Callable[[], Awaitable[object]]) -> FabricError:
    """Read until the call fails, and return the failure."""
    try:
        while True:
            await read()
    except FabricError as error:
        return error
