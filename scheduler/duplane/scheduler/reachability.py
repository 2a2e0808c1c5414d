"""Checks the health of workers that a caller could not reach, until these workers answer.

A caller may be wrong, or not be trusted. So a worker counts as unreachable only if it does not
answer this scheduler either. While this is checked, none of its slots is granted here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import grpc
import grpc.aio
from cachetools import TTLCache
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
# A worker that has just answered is checked again only after this time, and its slots are granted
# meanwhile. So callers that report a sound worker again and again do not take its slots away.
TRUST_S = 1.0
_MAX_TRUSTED = 4096  # workers whose last answer is remembered

_Key = tuple[str, int]  # worker id and epoch


class ReachabilityChecks:
    """One check for each worker that is reported, one loop of checks for each unreachable worker.

    `on_sound` is called when slots of a reported worker may be granted again.
    """

    def __init__(
        self,
        store: LeaseStore,
        state: SchedulerState,
        credentials: FabricCredentials | None = None,
        on_sound: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._credentials = credentials
        self._state = state
        self._on_sound = on_sound
        self._has_new = asyncio.Event()
        self._new: list[Callable[[], Coroutine[None, None, None]]] = []
        self._reported: set[_Key] = set()  # with a check that has not ended
        # When a reported worker may be checked again.
        self._trusted = TTLCache[_Key, float](_MAX_TRUSTED, TRUST_S, state.clock)
        self._checked: set[_Key] = set()
        state.listeners.append(self._on_change)
        state.unreachable_listeners.append(self._on_reported)

    async def run(self) -> None:
        """Check workers until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._has_new.wait()
                self._has_new.clear()
                for check in self._new:
                    tasks.create_task(check())
                self._new.clear()

    def _on_reported(self, worker_id: str) -> None:
        worker = self._state.workers.get(worker_id)
        if worker is None or worker.is_unreachable:
            return
        key = (worker.worker_id, worker.epoch)
        if key not in self._reported:
            self._reported.add(key)
            due = self._trusted.get(key, 0.0)
            if not due:
                self._state.suspect(*key)
            self._begin(partial(self._verify, worker, due))

    async def _verify(self, worker: Worker, due: float) -> None:
        """Mark a reported worker as unreachable if it does not answer at the time `due`."""
        key = (worker.worker_id, worker.epoch)
        try:
            await asyncio.sleep(due - self._state.clock())
            self._state.suspect(*key)
            if await answers(worker.register.address, self._credentials):
                self._trusted[key] = self._state.clock() + TRUST_S
            else:
                with contextlib.suppress(FabricError):  # without contact, the store does it later
                    await self._store.set_unreachable(*key, is_unreachable=True)
        finally:
            self._reported.discard(key)
            self._state.trust(*key)
            self._on_sound()

    def _begin(self, check: Callable[[], Coroutine[None, None, None]]) -> None:
        self._new.append(check)
        self._has_new.set()

    def _on_change(self, change: Change) -> None:
        match change:
            case WorkerPut(worker=worker) if worker.is_unreachable:
                key = (worker.worker_id, worker.epoch)
                if key not in self._checked:
                    self._checked.add(key)
                    self._begin(partial(self._check, worker))
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
