"""The server that is measured: a fabric that the command starts, or a server at a URL."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import psutil

from duplane.fabric.addresses import Address
from duplane.fabric.client import FabricClient
from duplane.fabric.tls.credentials import FabricCredentials
from duplane.fabric.v1 import admin_pb2, registry_pb2
from duplane.tools.bench.certificates import make_certificates
from duplane.tools.bench.load.watch import ProcessIds, assign, free_cores
from duplane.tools.bench.options import FabricBench
from duplane.tools.otlp_receiver import receiving_otlp
from duplane.tools.up.fabric import UpSettings, running
from duplane.tools.up.restarts import FIRST_DELAY_S, RestartDelay
from duplane.tools.up.supervisor import Role
from duplane.tools.up.temporary import temporary_directory
from duplane.worker.engine.engine_process import ENGINE_MODULE

_SPARE_SLOTS = 4  # for sessions that begin while other slots are being cleaned
_FREE_TIMEOUT_S = 15.0
_LOOK_S = 0.1


class Receiver:
    """Receives the spans of a fabric, counts their bytes, and discards them."""

    def __init__(self) -> None:
        self.byte_count = 0

    def _count(self, export: bytes) -> None:
        self.byte_count += len(export)

    @classmethod
    @contextlib.asynccontextmanager
    async def exporting(cls) -> AsyncGenerator[Receiver]:
        """Serve, and set the environment so that new processes export to this receiver."""
        receiver = cls()
        listen = Address("127.0.0.1", 0)
        async with receiving_otlp(listen, receiver._count) as address:
            with _environment(
                {
                    "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{address}",
                    "OTEL_EXPORTER_OTLP_INSECURE": "true",
                }
            ):
                yield receiver


@dataclass(frozen=True)
class Target:
    """A server under load."""

    edge_url: str  # empty if only a scheduler is known
    scheduler: str  # empty if only an edge is known
    process_ids: Mapping[str, ProcessIds]  # watched processes by name
    is_own: bool
    receiver: Receiver | None = None
    workers: Sequence[Role] = ()  # of the command's own fabric
    credentials: FabricCredentials | None = None  # of an operator, if the fabric has TLS
    edges: Sequence[Role] = ()  # of the command's own fabric

    def url(self, dialect: str) -> str:
        """Return the address to which a generator connects in a dialect."""
        return self.scheduler if dialect == "grpc" else self.edge_url

    async def slots_left(self) -> int | None:
        """Wait a short time for all slots to be free; return the number of slots that are not.

        Returns None if the command did not start the fabric.
        """
        if not self.is_own:
            return None
        async with FabricClient([self.scheduler], self.credentials) as client:
            until_s = time.monotonic() + _FREE_TIMEOUT_S
            while True:
                left = await _taken(client)
                if not left or time.monotonic() > until_s:
                    return left
                await asyncio.sleep(_LOOK_S)


async def _taken(client: FabricClient) -> int:
    """Return the number of slots that are not free or the number of leases: the larger one."""
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
            process_ids={name: _always(pids) for name, pids in options.watched.items()},
            is_own=False,
        )
        return
    async with contextlib.AsyncExitStack() as stack:
        receiver = None
        if options.telemetry:
            receiver = await stack.enter_async_context(Receiver.exporting())
        if options.edge_cpu is not None:
            stack.enter_context(_keeping_off(options.edge_cpu))
        is_stopping = options.stop_plan[0] > 0
        settings = UpSettings(
            port=0,
            worker_count=options.workers,
            slot_count=-(-(sessions + _SPARE_SLOTS) // (options.workers - is_stopping)),
            checkpoint=options.checkpoint,
            # Each session that moves or returns is a warning.
            log_level="ERROR" if is_stopping or options.makes_returns else "WARNING",
        )
        certificates, credentials = None, None
        if options.tls:
            certificates = stack.enter_context(temporary_directory("duplane-certificates-"))
            credentials = make_certificates(certificates)
        fabric = await stack.enter_async_context(running(settings, certificates))
        edge, *workers, scheduler = fabric.roles
        edges = [edge, *await stack.enter_async_context(_further_edges(options, fabric.scheduler))]
        if options.makes_returns:
            for one in edges:
                one.restart_delay = RestartDelay(max_delay_s=FIRST_DELAY_S)
        if is_stopping:
            for worker in workers:  # each stop stands for a single failure
                worker.restart_delay = RestartDelay(max_delay_s=FIRST_DELAY_S)
        if options.edge_cpu is not None:
            assign(edge.process_id, {options.edge_cpu})
        yield Target(
            f"ws://{fabric.edge}",
            fabric.scheduler,
            {
                "edge": lambda: [one.process_id for one in edges],
                "scheduler": lambda: [scheduler.process_id],
                "worker": lambda: _with_engines([worker.process_id for worker in workers]),
            },
            True,
            receiver,
            workers,
            credentials,
            edges,
        )


@contextlib.asynccontextmanager
async def _further_edges(options: FabricBench, scheduler: str) -> AsyncGenerator[Sequence[Role]]:
    """Run the edges beside the one of the fabric."""
    flags = ("edge", "--scheduler", scheduler, "--log-level", "ERROR")
    roles = [Role("edge", flags, "127.0.0.1:0") for _ in range(options.edge_count - 1)]
    async with asyncio.TaskGroup() as tasks:
        for role in roles:
            tasks.create_task(role.keep_running())
        try:
            for role in roles:
                await role.ready()
            yield roles
        finally:
            for role in roles:
                await role.stop()


def _with_engines(worker_ids: Sequence[int]) -> list[int]:
    """Return the ids of workers and of their engine processes. Raises psutil.NoSuchProcess."""
    engine_ids = [
        child.pid
        for worker_id in worker_ids
        for child in psutil.Process(worker_id).children()
        if ENGINE_MODULE in child.cmdline()
    ]
    return [*worker_ids, *engine_ids]


def _always(process_ids: Sequence[int]) -> ProcessIds:
    return lambda: process_ids


@contextlib.contextmanager
def _keeping_off(core: int):
    """During the `with`, keep this process, and the processes that it starts, off one core."""
    before = os.sched_getaffinity(0)
    assign(os.getpid(), free_cores(core))
    try:
        yield
    finally:
        assign(os.getpid(), before)


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Generator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
