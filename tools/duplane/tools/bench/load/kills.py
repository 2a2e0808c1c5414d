"""Kills workers of a fabric under load, each in turn."""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from collections.abc import Sequence

from duplane.fabric.client import FabricClient
from duplane.fabric.v1 import admin_pb2
from duplane.tools.bench.load.row import Kill
from duplane.tools.up.supervisor import Role


class Killer:
    """Kills a worker every `every_s` seconds, or none if `every_s` is 0. `kills` lists them."""

    def __init__(self, workers: Sequence[Role], scheduler: str, every_s: float) -> None:
        self.kills: list[Kill] = []
        self._workers = workers
        self._scheduler = scheduler
        self._every_s = every_s

    async def run(self, begin_s: float, seconds: float) -> None:
        """Kill workers for `seconds`, from `begin_s` on.

        After the last kill the sessions have enough time to move. If a worker is still starting
        when a kill is due, this kill is left out, because the other workers may have too few slots.
        """
        if not self._every_s:
            return
        turns = itertools.cycle(self._workers)
        async with FabricClient([self._scheduler]) as client:
            for number in range(1, int(seconds / self._every_s)):
                due_s = begin_s + number * self._every_s
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                if not all(worker.is_ready for worker in self._workers):
                    continue
                worker = next(turns)
                count = await _session_count(client, worker.address)
                worker.send_signal(signal.SIGKILL)
                self.kills.append(Kill(time.monotonic(), count))


async def _session_count(client: FabricClient, address: str) -> int:
    """Return the number of leases on the slots of a worker."""
    workers = await client.administer(
        lambda admin: admin.ListWorkers(admin_pb2.ListWorkersRequest())
    )
    leases = await client.administer(lambda admin: admin.ListLeases(admin_pb2.ListLeasesRequest()))
    ids = {one.worker.worker_id for one in workers.workers if one.worker.address == address}
    return sum(lease.claims.worker_id in ids for lease in leases.leases)
