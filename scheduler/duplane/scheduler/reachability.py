"""Checks the health of workers that a caller could not reach, until these workers answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2
from grpc_health.v1 import health_pb2_grpc as _typed_health_grpc

from duplane.fabric.channel import open_channel
from duplane.fabric.errors import FabricError
from duplane.fabric.tls.credentials import FabricCredentials
from duplane.fabric.tls.identity import Role
from duplane.scheduler.state import SchedulerState
from duplane.scheduler.store.base import Change, LeaseStore, Worker, WorkerPut

_log = logging.getLogger(__name__)
# The published stubs have no types for the asyncio API of this package.
health_grpc: Any = _typed_health_grpc

CHECK_TIMEOUT_S = 2.0
FIRST_INTERVAL_S = 0.5
MAX_INTERVAL_S = 30.0  # the interval between checks doubles up to this bound


class ReachabilityChecks:
    """One loop of health checks for each worker that is marked as unreachable."""

    def __init__(
        self,
        store: LeaseStore,
        state: SchedulerState,
        credentials: FabricCredentials | None = None,
    ) -> None:
        self._store = store
        self._credentials = credentials
        self._state = state
        self._has_new = asyncio.Event()
        self._new: list[Worker] = []
        self._checked: set[tuple[str, int]] = set()  # worker id and epoch
        state.listeners.append(self._on_change)

    async def run(self) -> None:
        """Check workers until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._has_new.wait()
                self._has_new.clear()
                for worker in self._new:
                    tasks.create_task(self._check(worker))
                self._new.clear()

    def _on_change(self, change: Change) -> None:
        match change:
            case WorkerPut(worker=worker) if worker.is_unreachable:
                key = (worker.worker_id, worker.epoch)
                if key not in self._checked:
                    self._checked.add(key)
                    self._new.append(worker)
                    self._has_new.set()
            case _:
                pass

    async def _check(self, worker: Worker) -> None:
        """Call the worker at growing intervals until it answers or its registration ends."""
        worker_id = worker.worker_id
        address = worker.register.address
        _log.warning("worker %s cannot be reached at %s: no grants", worker_id, address)
        interval_s = FIRST_INTERVAL_S
        try:
            while self._is_attached(worker) and not await answers(address, self._credentials):
                await asyncio.sleep(interval_s)
                interval_s = min(2 * interval_s, MAX_INTERVAL_S)
        finally:
            self._checked.discard((worker_id, worker.epoch))
        with contextlib.suppress(FabricError):  # without contact, the store does it later
            if await self._store.set_unreachable(worker_id, worker.epoch, is_unreachable=False):
                _log.info("worker %s answers again", worker_id)

    def _is_attached(self, worker: Worker) -> bool:
        known = self._state.workers.get(worker.worker_id)
        return known is not None and known.epoch == worker.epoch


async def answers(address: str, credentials: FabricCredentials | None = None) -> bool:
    """True if the health service of a worker at host:port gives any answer."""
    async with open_channel(address, Role.WORKER, credentials) as channel:
        try:
            request = health_pb2.HealthCheckRequest()
            await health_grpc.HealthStub(channel).Check(request, timeout=CHECK_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            unreachable = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
            return error.code() not in unreachable
    return True
