"""One scheduler process: how its parts are put together, and how it starts and stops."""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import UTC, datetime

from duplane.fabric import process
from duplane.fabric.channel import FabricServer
from duplane.fabric.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    lease_pb2,
    lease_pb2_grpc,
    registry_pb2,
    registry_pb2_grpc,
)
from duplane.scheduler.admin import AdminServicer
from duplane.scheduler.feed import Feed
from duplane.scheduler.leases import LeaseServicer
from duplane.scheduler.line import Line
from duplane.scheduler.placement import Placement
from duplane.scheduler.registry import RegistryServicer
from duplane.scheduler.settings import SchedulerSettings
from duplane.scheduler.store import open_store
from duplane.scheduler.view import View

_log = logging.getLogger(__name__)

_SERVICES = tuple(
    file.DESCRIPTOR.services_by_name[name].full_name
    for file, name in (
        (lease_pb2, "LeaseService"),
        (registry_pb2, "RegistryService"),
        (admin_pb2, "AdminService"),
    )
)


class Scheduler:
    """The parts of one scheduler, and the server that they are served from."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self._settings = settings
        self._store = open_store(settings.store, boot_ms=_wall_ms())
        signer = settings.open_signer()
        view = View(time.monotonic)
        self._line = Line(self._store, view, settings.ticket_limit)
        self._feed = Feed(view, settings.ticket_limit)
        self._hold_times = view.hold_times
        self._placement = Placement(
            self._store, view, settings.claim_timeout_s, settings.resume_grace_s
        )
        self._leases = LeaseServicer(
            settings, self._store, view, self._line, self._placement, signer
        )
        self._registry = RegistryServicer(
            settings, self._store, view, self._placement, self._feed, signer
        )
        self._store.subscribe(view.apply)

    async def start(self, tasks: asyncio.TaskGroup) -> str:
        """Serve, with the loops in `tasks`, and return the host:port that was bound."""
        self._server = FabricServer(*_SERVICES)
        lease_pb2_grpc.add_LeaseServiceServicer_to_server(self._leases, self._server.grpc)
        registry_pb2_grpc.add_RegistryServiceServicer_to_server(self._registry, self._server.grpc)
        admin = AdminServicer(self._store, self._feed, self._hold_times)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, self._server.grpc)
        address = await self._server.start(self._settings.listen)
        self._loops = [
            tasks.create_task(self._store.run()),
            tasks.create_task(self._placement.run()),
        ]
        return address

    async def stop(self) -> None:
        """End every call, those that do not within the time limit by force, and the loops.

        Callers that wait and workers are told UNAVAILABLE, which sends them to another scheduler.
        Leases given out stay good.
        """
        self._line.close()
        self._registry.close()
        self._feed.close()
        await self._server.stop(self._settings.stop_timeout_s)
        for loop in self._loops:
            loop.cancel()


async def serve(settings: SchedulerSettings, shutdown: process.Shutdown) -> None:
    """Run one scheduler until `shutdown`: it has nothing to drain, sessions go on without it."""
    scheduler = Scheduler(settings)
    async with asyncio.TaskGroup() as tasks:
        address = await scheduler.start(tasks)
        process.announce("scheduler", address)
        try:
            await shutdown.wait()
        finally:
            await scheduler.stop()
    _log.info("stopped")


def _wall_ms() -> int:
    return int(datetime.now(UTC).timestamp() * 1000)
