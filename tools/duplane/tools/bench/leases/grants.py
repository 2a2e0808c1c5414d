"""`duplane bench leases`: grants of real scheduler processes, over gRPC.

The workers run in this process: each has the real admission and attach loop, but no model. A
session ends as soon as it has claimed its lease; then its slot is cleaned.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import random
import signal
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from duplane.fabric.client import FabricClient
from duplane.fabric.errors import FabricError
from duplane.fabric.tls.identity import Role as FabricRole
from duplane.fabric.v1 import lease_pb2, registry_pb2
from duplane.scheduler.etcd.client import EtcdClient
from duplane.scheduler.etcd.url import EtcdUrl
from duplane.tools.bench.certificates import NAME, credentials_of, make_certificates
from duplane.tools.bench.options import LeaseBench
from duplane.tools.bench.report import percentile, show
from duplane.tools.up.restarts import FIRST_DELAY_S, RestartDelay
from duplane.tools.up.supervisor import Role
from duplane.tools.up.temporary import temporary_directory
from duplane.worker.admission import Admission, slot_reports
from duplane.worker.attach import AttachedWorker, AttachLoop

_KIND = lease_pb2.SESSION_KIND_AUDIO_DUPLEX
_QUIET_COUNT = 200  # grants with a free slot, one after the other
_GRANTS_PER_KILL = 200
_GRANT_TIMEOUT_S = 60.0  # a request that has no grant by then is lost
_CLIENTS = 4  # channels over which the requests are sent


@dataclass
class _Counts:
    """The counts and times of one run."""

    quiet_ms: list[float] = field(default_factory=list[float])
    loaded_ms: list[float] = field(default_factory=list[float])
    granted_at: list[float] = field(default_factory=list[float])
    numbers: set[tuple[str, int, int]] = field(default_factory=set[tuple[str, int, int]])
    double_count: int = 0
    refused_count: int = 0
    lost_ticket_count: int = 0
    lost_position_count: int = 0
    kill_count: int = 0
    # CPU time per grant: of all schedulers together, and of this process.
    cpu_ms: Sequence[float] = (math.nan, math.nan)
    has_grant: asyncio.Event = field(default_factory=asyncio.Event)

    def add_grant(self, granted: lease_pb2.Granted) -> None:
        """Count a grant.

        It is a double grant if the same slot and fencing number were granted before.
        """
        claims = lease_pb2.LeaseClaims.FromString(granted.lease.claims)
        number = (claims.worker_id, claims.slot, claims.fencing_number)
        self.double_count += number in self.numbers
        self.numbers.add(number)
        self.granted_at.append(time.perf_counter())
        self.has_grant.set()

    @property
    def grants_per_second(self) -> float:
        return (len(self.granted_at) - 1) / (self.granted_at[-1] - self.granted_at[0])

    @property
    def longest_gap_s(self) -> float:
        return max(after - before for before, after in itertools.pairwise(self.granted_at))


class _Worker:
    """A worker without a model."""

    def __init__(
        self,
        number: int,
        slot_count: int,
        schedulers: Sequence[str],
        counts: _Counts,
        certificates: Path | None,
    ) -> None:
        credentials = credentials_of(certificates, FabricRole.WORKER)
        self._register = registry_pb2.Register(
            worker_id=f"{NAME}-{number}",
            incarnation=uuid.uuid4().hex,
            address="127.0.0.1:1",
            kinds=[_KIND],
        )
        self._counts = counts
        self._sessions: dict[int, str] = {}  # lease ids by slot
        self._admission = Admission(self._register.worker_id, slot_count, [_KIND])
        attached = AttachedWorker(
            admission=self._admission,
            register=self._registration,
            report=self._report,
            end_session=_no_session,
            drain=_ignore,  # nobody drains or stops these workers
            undrain=_ignore,
            stop=_ignore,
        )
        self._loop = AttachLoop(schedulers, attached, credentials)
        self._admission.on_change = self._loop.report_soon
        self.run = self._loop.run

    @property
    def worker_id(self) -> str:
        return self._register.worker_id

    async def serve(self, granted: lease_pb2.Granted) -> bool:
        """Run a session. Return False if the lease is refused."""
        try:
            claims = self._admission.claim(granted.lease, time.monotonic())
        except FabricError:
            self._counts.refused_count += 1
            return False
        self._counts.double_count += claims.slot in self._sessions
        self._sessions[claims.slot] = claims.lease_id
        await asyncio.sleep(0)
        del self._sessions[claims.slot]
        self._admission.begin_cleanup(claims.slot)
        self._admission.finish_cleanup(claims.slot, is_clean=True)
        return True

    def _registration(self) -> registry_pb2.Register:
        register = registry_pb2.Register(slots=slot_reports(self._admission))
        register.MergeFrom(self._register)
        return register

    def _report(self) -> registry_pb2.Report:
        return registry_pb2.Report(slots=slot_reports(self._admission))


def _ignore() -> None:
    return


def _no_session(slot: int, reason: object) -> None:
    """Ignore a revocation: the session has ended before it arrives."""


class _Bench:
    """Schedulers, workers and clients of one run."""

    def __init__(self, options: LeaseBench) -> None:
        self._options = options
        self._counts = _Counts()
        self._random = random.Random(1)
        self._workers: dict[str, _Worker] = {}  # key: worker id

    async def run(self) -> _Counts:
        async with contextlib.AsyncExitStack() as stack:
            certificates = None
            if self._options.tls:
                certificates = stack.enter_context(temporary_directory("duplane-certificates-"))
                make_certificates(certificates)
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            schedulers = [
                await self._start(stack, tasks, certificates) for _ in range(self._options.replicas)
            ]
            addresses = [role.address for role in schedulers]
            for number in range(self._options.workers):
                own = _rotated(addresses, number)
                worker = _Worker(number, self._options.slots, own, self._counts, certificates)
                self._workers[worker.worker_id] = worker
            background = [tasks.create_task(one.run()) for one in self._workers.values()]
            credentials = credentials_of(certificates, FabricRole.EDGE)
            clients = [
                await stack.enter_async_context(
                    FabricClient(_rotated(addresses, number), credentials)
                )
                for number in range(_CLIENTS)
            ]
            for _ in range(_QUIET_COUNT):
                self._counts.quiet_ms.append(await self._request(clients[0]))
            self._counts.granted_at.clear()
            if self._options.kills:
                background.append(tasks.create_task(self._kill(schedulers)))
            before_s = self._cpu_s(schedulers)
            await self._load(clients)
            if not self._options.kills:  # with kills, the CPU time of the killed processes is lost
                used_s = zip(self._cpu_s(schedulers), before_s, strict=True)
                per_grant = 1e3 / self._options.grants
                self._counts.cpu_ms = [(end - begin) * per_grant for end, begin in used_s]
            for task in background:
                task.cancel()
        return self._counts

    def _cpu_s(self, schedulers: Sequence[Role]) -> tuple[float, float]:
        """Return the CPU seconds of all schedulers together, and those of this process."""
        return sum(_cpu_s(role.process_id) for role in schedulers), time.process_time()

    async def _start(
        self,
        stack: contextlib.AsyncExitStack,
        tasks: asyncio.TaskGroup,
        certificates: Path | None,
    ) -> Role:
        tls = ("--fabric-tls", str(certificates / FabricRole.SCHEDULER)) if certificates else ()
        role = Role(
            "scheduler",
            ("scheduler", "--store", self._options.store, "--log-level", "ERROR", *tls),
            "127.0.0.1:0",
            RestartDelay(max_delay_s=FIRST_DELAY_S),  # each kill stands for a single failure
        )
        stack.push_async_callback(role.stop)
        tasks.create_task(role.keep_running())
        role.address = await role.ready()
        return role

    async def _load(self, clients: Sequence[FabricClient]) -> None:
        """Make the requests, `callers` at a time."""
        left = iter(range(self._options.grants))

        async def call(client: FabricClient) -> None:
            for _ in left:
                self._counts.loaded_ms.append(await self._request(client))

        async with asyncio.TaskGroup() as tasks:
            for number in range(self._options.callers):
                tasks.create_task(call(clients[number % len(clients)]))

    async def _request(self, client: FabricClient) -> float:
        """Acquire a slot and use it; return the milliseconds from the request to the grant."""
        begin = time.perf_counter()
        try:
            async with asyncio.timeout(_GRANT_TIMEOUT_S):
                return (await self._acquire(client) - begin) * 1e3
        except (TimeoutError, FabricError):
            self._counts.lost_ticket_count += 1
            return _GRANT_TIMEOUT_S * 1e3

    async def _acquire(self, client: FabricClient) -> float:
        """Acquire a slot whose worker accepts the lease; return the time of the grant."""
        position = _Position(self._counts)
        while True:
            request = lease_pb2.AcquireLeaseRequest(
                request_id=uuid.uuid4().hex,
                kind=_KIND,
                ticket_id=position.ticket_id,
                was_granted=bool(position.ticket_id),
                ticket_proof=position.ticket_proof,
            )
            granted = await client.acquire(request, position.update)
            granted_at = time.perf_counter()
            self._counts.add_grant(granted)
            if await self._workers[granted.worker_id].serve(granted):
                return granted_at
            position.ticket_id = granted.ticket_id
            position.ticket_proof = granted.ticket_proof
            await client.release(granted.lease_id)

    async def _kill(self, schedulers: Sequence[Role]) -> None:
        for count in itertools.count(_GRANTS_PER_KILL, _GRANTS_PER_KILL):
            while len(self._counts.granted_at) < count:
                self._counts.has_grant.clear()
                await self._counts.has_grant.wait()
            role = self._random.choice(schedulers)
            await role.ready()
            os.kill(role.process_id, signal.SIGKILL)
            self._counts.kill_count += 1


class _Position:
    """Checks that the position of one request in the queue never grows."""

    def __init__(self, counts: _Counts) -> None:
        self.ticket_id = ""
        self.ticket_proof = b""
        self._counts = counts
        self._lowest: int | None = None

    async def update(self, queued: lease_pb2.Queued) -> None:
        """Count a lost position if `queued` has a higher one than before, or another ticket."""
        is_other = self.ticket_id not in ("", queued.ticket_id)
        has_grown = self._lowest is not None and queued.position > self._lowest
        self._counts.lost_position_count += is_other or has_grown
        self.ticket_id, self._lowest = queued.ticket_id, queued.position
        self.ticket_proof = queued.ticket_proof


def _rotated(addresses: Sequence[str], start: int) -> Sequence[str]:
    at = start % len(addresses)
    return [*addresses[at:], *addresses[:at]]


async def bench_leases(options: LeaseBench) -> None:
    """Measure and print."""
    floor_ms = await _floor_ms(options.store)
    counts = await _Bench(options).run()
    ended = f"{options.replicas} scheduler(s), {options.store}"
    show(
        f"{options.workers} workers of {options.slots} slots, {options.callers} callers, {ended}",
        ("request to grant, ms", "grants", "p50", "p99", "max"),
        [
            _row("a slot is free, one at a time", counts.quiet_ms),
            _row("all at once, through the queue", counts.loaded_ms),
            *([_row("floor: one etcd put", floor_ms)] if floor_ms else ()),
        ],
    )
    show(
        f"through the queue, {counts.kill_count} schedulers killed",
        (
            *("grants per second", "longest gap s", "CPU ms per grant: schedulers", "this process"),
            *("double grants", "lost tickets", "lost positions"),
        ),
        [
            (
                f"{counts.grants_per_second:.0f}",
                f"{counts.longest_gap_s:.2f}",
                *("" if math.isnan(one) else f"{one:.1f}" for one in counts.cpu_ms),
                str(counts.double_count),
                str(counts.lost_ticket_count),
                str(counts.lost_position_count),
            )
        ],
    )


def _cpu_s(process_id: int) -> float:
    """Return the CPU seconds that a process has used; nan if the system does not report them."""
    try:
        fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return math.nan
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _floor_ms(store: str) -> Sequence[float]:
    """Write one key of etcd repeatedly; return the milliseconds of each write."""
    if store == "memory:":
        return ()
    url = EtcdUrl.parse(store)
    client = EtcdClient(url.addresses)
    key = f"{url.prefix}bench".encode()
    try:
        times = [await _put_ms(client, key) for _ in range(_QUIET_COUNT)]
        await client.delete(key)
    finally:
        await client.close()
    return times


async def _put_ms(client: EtcdClient, key: bytes) -> float:
    begin = time.perf_counter()
    await client.put(key, bytes(200))
    return (time.perf_counter() - begin) * 1e3


def _row(name: str, values: Sequence[float]) -> Sequence[str]:
    figures = (percentile(values, 0.5), percentile(values, 0.99), max(values, default=0.0))
    return (name, str(len(values)), *(f"{value:.1f}" for value in figures))
