"""The workers that a client avoids, because it could not reach them lately."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import NamedTuple

from cachetools import TTLCache

from duplane.fabric.durations import to_duration
from duplane.fabric.health_checks import TIME_LIMIT_S, HealthChecks
from duplane.fabric.v1 import lease_pb2

_AVOID_S = 15.0  # longest time for which a worker is avoided
_RECHECK_S = 0.5  # between two checks whether an avoided worker serves
_MAX_COUNT = 64  # as AcquireLeaseRequest.avoided_worker_ids allows


class _Avoided(NamedTuple):
    until_s: float  # monotonic
    incarnation: str  # of the process that is avoided; empty means any


class AvoidedWorkers:
    """Avoids workers for a limited time, or until they serve again."""

    def __init__(self, checks: HealthChecks) -> None:
        self._checks = checks
        self._avoided = TTLCache[str, _Avoided, float](_MAX_COUNT, _AVOID_S)  # by worker id
        self._rechecks: dict[str, asyncio.Task[None]] = {}  # by worker id

    def add(self, granted: lease_pb2.Granted) -> None:
        """Avoid the worker of a grant."""
        worker_id = granted.worker_id
        until_s = time.monotonic() + _AVOID_S
        self._avoided[worker_id] = _Avoided(until_s, granted.worker_incarnation)
        if granted.worker_address and worker_id not in self._rechecks:
            recheck = asyncio.create_task(self._recheck(worker_id, granted.worker_address))
            self._rechecks[worker_id] = recheck
            recheck.add_done_callback(lambda _: self._rechecks.pop(worker_id))

    def own(self, request: lease_pb2.AcquireLeaseRequest) -> dict[str, _Avoided]:
        """Return the workers that a request itself avoids, from now on."""
        until_s = time.monotonic() + _AVOID_S
        incarnations = itertools.chain(request.avoided_worker_incarnations, itertools.repeat(""))
        named = zip(request.avoided_worker_ids, incarnations, strict=False)
        return {worker_id: _Avoided(until_s, incarnation) for worker_id, incarnation in named}

    def write(self, request: lease_pb2.AcquireLeaseRequest, own: dict[str, _Avoided]) -> None:
        """Write all avoided workers to a request, and how long they are avoided still."""
        # During the iteration of `items`, no entry expires. In `**self._avoided`, one could.
        avoided = {**own, **dict(self._avoided.items())}
        left_s = max((one.until_s for one in avoided.values()), default=0.0) - time.monotonic()
        request.avoided_worker_ids[:] = list(avoided)[:_MAX_COUNT]
        incarnations = [one.incarnation for one in avoided.values()]
        request.avoided_worker_incarnations[:] = incarnations[:_MAX_COUNT]
        request.avoided_duration.CopyFrom(to_duration(left_s))

    async def _recheck(self, worker_id: str, address: str) -> None:
        """Avoid a worker no longer once it serves: the other workers may have no free slot."""
        while worker_id in self._avoided:
            await asyncio.sleep(_RECHECK_S)
            if await self._checks.is_serving(address, TIME_LIMIT_S):
                self._avoided.pop(worker_id, None)

    async def close(self) -> None:
        """End all checks."""
        rechecks = list(self._rechecks.values())
        for recheck in rechecks:
            recheck.cancel()
        await asyncio.gather(*rechecks, return_exceptions=True)
