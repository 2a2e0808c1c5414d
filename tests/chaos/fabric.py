"""The fabric that is broken: etcd members, schedulers, workers and edges, all on this machine."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

from support.fabric.real_fabric import get_json
from support.fabric.servers import DUPLANE, Loopback, Server
from support.ports import free_ports
from support.scheduler.etcd_server import EtcdCluster, Member
from support.time_limits import until

from duplane.scheduler.etcd.client import EtcdClient

Process = Server[Loopback] | Member
ETCD_COUNT = SCHEDULER_COUNT = WORKER_COUNT = 3
EDGE_COUNT = 2
START_S = 60.0
SETTLE_S = 60.0
_PREFIX = "/chaos/"


class ChaosFabric:
    """The processes, and what the edges and etcd say about them."""

    def __init__(
        self, folder: Path, etcd: EtcdCluster, slot_count: int, edge_flags: Sequence[str]
    ) -> None:
        self._folder = folder
        self._etcd = etcd
        self._slot_count = slot_count
        self._ports = iter(free_ports(SCHEDULER_COUNT + WORKER_COUNT + EDGE_COUNT))
        store = ("--store", etcd.url(_PREFIX))
        self.schedulers = [self._server("scheduler", at, *store) for at in range(SCHEDULER_COUNT)]
        finding = ("--scheduler", ",".join(one.address for one in self.schedulers))
        scripted = ("--checkpoint", "scripted", "--slots", str(slot_count))
        self.workers = [
            self._server("worker", at, *finding, *scripted, "--worker-id", f"worker{at}")
            for at in range(WORKER_COUNT)
        ]
        self.edges = [self._server("edge", at, *finding, *edge_flags) for at in range(EDGE_COUNT)]
        members = {f"etcd{at}": member for at, member in enumerate(etcd.members)}
        servers = {one.name: one for one in (*self.schedulers, *self.workers, *self.edges)}
        self.processes: Mapping[str, Process] = {**members, **servers}

    def _server(self, role: str, index: int, *flags: str) -> Server[Loopback]:
        port, name = next(self._ports), f"{role}{index}"
        command = (*DUPLANE, role, "--listen", f"127.0.0.1:{port}", *flags)
        return Server(name, Loopback(), port, command, self._folder / f"{name}.log")

    @classmethod
    @contextlib.asynccontextmanager
    async def running(
        cls, folder: Path, slot_count: int, *edge_flags: str
    ) -> AsyncGenerator[ChaosFabric]:
        """Start all processes, and kill them at the end. `folder` gets their logs."""
        async with EtcdCluster.running(folder, ETCD_COUNT) as etcd:
            fabric = cls(folder, etcd, slot_count, edge_flags)
            servers = (*fabric.schedulers, *fabric.workers, *fabric.edges)
            try:
                for server in servers:
                    server.start()
                await fabric.until_free(START_S)
                yield fabric
            finally:
                for server in servers:
                    if server.is_running:
                        server.kill()

    async def _get(self, edge: Server[Loopback], path: str) -> dict[str, Any]:
        """Return the JSON of an edge's answer; an empty object if there is none."""
        try:
            code, body = await asyncio.to_thread(get_json, f"http://{edge.address}{path}")
        except OSError:
            return {}
        return body if code == 200 else {}

    async def _until_status(self, expected: Mapping[str, int], within_s: float) -> None:
        async def is_reached() -> bool:
            found = [await self._get(edge, "/status") for edge in self.edges]
            return all(expected.items() <= status.items() for status in found)

        await until(is_reached, within_s)

    async def until_whole(self) -> None:
        """Wait until every edge sees all workers serve. Raises TimeoutError."""
        expected = {"total_workers": WORKER_COUNT, "offline_workers": 0, "lost_worker_count": 0}
        await self._until_status(expected, SETTLE_S)

    async def until_free(self, within_s: float = SETTLE_S) -> None:
        """Wait until all slots are free, without leases and tickets. Raises TimeoutError."""
        free = {"free_slot_count": WORKER_COUNT * self._slot_count}
        await self._until_status({**free, "lease_count": 0, "ticket_count": 0}, within_s)

    async def session_counts(self) -> Mapping[str, int]:
        """Return the number of sessions of each worker."""
        rows = (await self._get(self.edges[0], "/workers")).get("workers", ())
        return {row["worker_id"]: len(row["sessions"]) for row in rows}

    async def keys(self) -> Counter[str]:
        """Return the number of keys of each kind in etcd (see `store.etcd.keys`)."""
        client = EtcdClient(self._etcd.addresses)
        try:
            _, found = await client.read_all(_PREFIX.encode())
        finally:
            await client.close()
        names = (one.key.decode().removeprefix(_PREFIX) for one in found)
        return Counter(name.partition("/")[0] for name in names)
