"""Stops workers of a fabric under load, each in turn; the fabric starts them again."""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from collections.abc import Sequence

from duplane.fabric.client import FabricClient
from duplane.fabric.tls.credentials import FabricCredentials
from duplane.fabric.v1 import admin_pb2
from duplane.tools.bench.load.row import Stop
from duplane.tools.up.supervisor import Role


class Stopper:
    """Sends a signal to a worker every `every_s` seconds, or to none if `every_s` is 0.

    `stops` lists the workers that got the signal.
    """

    def __init__(
        self,
        workers: Sequence[Role],
        scheduler: str,
        every_s: float,
        number: signal.Signals,
        credentials: FabricCredentials | None = None,
    ) -> None:
        self.stops: list[Stop] = []
        self._workers = workers
        self._scheduler = scheduler
        self._credentials = credentials
        self._every_s = every_s
        self._signal = number

    async def run(self, begin_s: float, seconds: float) -> None:
        """Stop workers for `seconds`, from `begin_s` on.

        After the last stop the sessions have enough time to move. If a worker is still starting
        or still draining when a stop is due, this stop is left out, because the other workers may
        have too few slots.
        """
        if not self._every_s:
            return
        turns = itertools.cycle(self._workers)
        stopped: tuple[Role, int] | None = None  # the last worker that got the signal
        async with FabricClient([self._scheduler], self._credentials) as client:
            for number in range(1, int(seconds / self._every_s)):
                due_s = begin_s + number * self._every_s
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                if not all(worker.is_ready for worker in self._workers):
                    continue
                if stopped and stopped[0].process_id == stopped[1]:  # a draining process is ready
                    continue
                worker = next(turns)
                count = await _session_count(client, worker.address)
                stopped = worker, worker.process_id
                worker.send_signal(self._signal)
                self.stops.append(Stop(time.monotonic(), count))


async def _session_count(client: FabricClient, address: str) -> int:
    """Return the number of leases on the slots of a worker."""
    workers = await client.administer(
        lambda admin: admin.ListWorkers(admin_pb2.ListWorkersRequest())
    )
    leases = await client.administer(lambda admin: admin.ListLeases(admin_pb2.ListLeasesRequest()))
    ids = {one.worker.worker_id for one in workers.workers if one.worker.address == address}
    return sum(lease.claims.worker_id in ids for lease in leases.leases)
