"""The server that is measured: a fabric that the command starts, or a server at a URL."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from duplane.fabric.client import FabricClient
from duplane.fabric.v1 import admin_pb2, registry_pb2
from duplane.tools.bench.load.telemetry import Receiver
from duplane.tools.bench.load.watch import assign, free_cores
from duplane.tools.bench.options import FabricBench
from duplane.tools.up.fabric import Fabric, UpSettings, running

_SPARE_SLOTS = 4  # for sessions that begin while other slots are being cleaned
_FREE_TIMEOUT_S = 15.0
_LOOK_S = 0.1


@dataclass(frozen=True)
class Target:
    """A server under load."""

    edge_url: str  # empty if only a scheduler is known
    scheduler: str  # empty if only an edge is known
    process_ids: Mapping[str, Sequence[int]]  # watched processes by name
    is_own: bool
    receiver: Receiver | None = None

    def url(self, dialect: str) -> str:
        """Return the address to which a generator connects in a dialect."""
        return self.scheduler if dialect == "grpc" else self.edge_url

    async def slots_left(self) -> int | None:
        """Wait a short time for all slots to be free; return the number of slots that are not.

        Returns None if the fabric is not the command's own.
        """
        if not self.is_own:
            return None
        async with FabricClient([self.scheduler]) as client:
            until_s = time.monotonic() + _FREE_TIMEOUT_S
            while True:
                left = await _taken(client)
                if not left or time.monotonic() > until_s:
                    return left
                await asyncio.sleep(_LOOK_S)


async def _taken(client: FabricClient) -> int:
    """Count the slots that their workers do not report as free, or that have a lease."""
    workers = await client.administer(
        lambda admin: admin.ListWorkers(admin_pb2.ListWorkersRequest())
    )
    leases = await client.administer(lambda admin: admin.ListLeases(admin_pb2.ListLeasesRequest()))
    slots = [
        slot
        for one in workers.workers
        for slot in (one.report.slots or one.worker.slots)
        if slot.state != registry_pb2.SLOT_STATE_FREE
    ]
    return max(len(slots), len(leases.leases))


@contextlib.asynccontextmanager
async def target(options: FabricBench, sessions: int) -> AsyncGenerator[Target]:
    """Start a fabric with slots for `sessions`, or use the server of `--url`.

    Raises UsageError, StartError, and RoleError in a group.
    """
    if options.url:
        parts = urlsplit(options.url)
        is_scheduler = parts.scheme == "grpc"
        yield Target(
            edge_url="" if is_scheduler else options.url,
            scheduler=parts.netloc if is_scheduler else "",
            process_ids=options.watched,
            is_own=False,
        )
        return
    async with contextlib.AsyncExitStack() as stack:
        receiver = None
        if options.telemetry:
            receiver = await stack.enter_async_context(Receiver.exporting())
        if options.edge_cpu is not None:
            stack.enter_context(_keeping_off(options.edge_cpu))
        settings = UpSettings(
            port=0,
            worker_count=options.workers,
            slot_count=-(-(sessions + _SPARE_SLOTS) // options.workers),
            checkpoint=options.checkpoint,
            log_level="WARNING",
        )
        fabric = await stack.enter_async_context(running(settings))
        process_ids = _process_ids(fabric)
        if options.edge_cpu is not None:
            assign(process_ids["edge"][0], {options.edge_cpu})
        yield Target(f"ws://{fabric.edge}", fabric.scheduler, process_ids, True, receiver)


@contextlib.contextmanager
def _keeping_off(core: int):
    """During the `with`, keep this process, and the processes that it starts, off one core."""
    before = os.sched_getaffinity(0)
    assign(os.getpid(), free_cores(core))
    try:
        yield
    finally:
        assign(os.getpid(), before)


def _process_ids(fabric: Fabric) -> Mapping[str, Sequence[int]]:
    edge, *workers, scheduler = fabric.roles
    return {
        "edge": [edge.process_id],
        "scheduler": [scheduler.process_id],
        "worker": [worker.process_id for worker in workers],
    }
