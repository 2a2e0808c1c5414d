"""A fabric on several hosts: three etcd members, three schedulers, two edges, four workers.

All are real processes, each on a host of its own (`support.fabric.hosts`). A worker runs the
scripted model and has one slot.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
from collections.abc import AsyncGenerator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import orjson
from support.debian_programs import debian_program
from support.fabric.hosts import NETWORK, Host, Network
from support.fabric.servers import DUPLANE, Server
from support.fabric.tls_fabric import FabricCertificates
from support.time_limits import WITHIN_S, until
from websockets.asyncio.client import ClientConnection, connect

from duplane.fabric.tls.identity import Role

ETCD_PORT, PEER_PORT, METRICS_PORT = 2379, 2380, 2381
SCHEDULER_PORT, EDGE_PORT, WORKER_PORT = 8010, 8006, 8020
START_S = 60.0
SETTLE_S = 30.0
"""Time limit in which a repaired fabric must settle: leases in etcd last 10 s, and gRPC's pings
notice a lost peer after 15 s."""

SCHEDULERS_NAME = "schedulers.test"
TICKET_LIMIT = 10
SCHEDULER_FLAGS = (
    *("--report-interval-s", "0.5", "--queued-interval-s", "1"),
    *("--ticket-limit", str(TICKET_LIMIT)),
)
WORKER_FLAGS = ("--slots", "1", "--stuck-after-s", "2", "--hung-after-s", "10")
EDGE_FLAGS = (
    *("--scheduler-s", "10", "--drain-s", "3"),
    # All clients of these tests have one address.
    *("--client-session-count", "2000", "--client-connection-count", "2000"),
    *("--client-requests-per-s", "2000"),
    *("--behind-tls-proxy", "--auth", "none"),  # clients here use ws:// and have no keys
)
_LIFE = timedelta(days=1)  # of certificates: clocks jump by hours


class Cluster:
    """The processes of the fabric, and one more host for clients."""

    def __init__(self, folder: Path) -> None:
        names = folder / "names"
        names.touch()
        self._certificates = FabricCertificates(folder / "certificates")
        self.network = Network(names)
        self._folder = folder
        self.client = self.network.add_host()
        self.etcd = [self._add_etcd(index) for index in range(3)]
        members = ",".join(member.address for member in self.etcd)
        self.schedulers = [
            self._add(
                "scheduler", index, SCHEDULER_PORT, "--store", f"etcd://{members}", *SCHEDULER_FLAGS
            )
            for index in range(3)
        ]
        schedulers = ("--scheduler", ",".join(one.address for one in self.schedulers))
        self.workers = [
            self._add(
                "worker",
                index,
                WORKER_PORT,
                *("--checkpoint", "scripted", "--worker-id", f"worker{index}"),
                *(*schedulers, *WORKER_FLAGS),
            )
            for index in range(4)
        ]
        # The second edge and the last worker find the schedulers by a name that stands for several
        # addresses.
        by_name = ("--scheduler", f"{SCHEDULERS_NAME}:{SCHEDULER_PORT}")
        self.workers[-1].command = (*self.workers[-1].command, *by_name)
        self.edges = [
            self._add("edge", index, EDGE_PORT, *finding, *EDGE_FLAGS)
            for index, finding in enumerate((schedulers, by_name))
        ]
        names.write_text("".join(f"{one.host.ip} {SCHEDULERS_NAME}\n" for one in self.schedulers))

    @property
    def servers(self) -> Sequence[Server[Host]]:
        return (*self.etcd, *self.schedulers, *self.workers, *self.edges)

    def _add_etcd(self, index: int) -> Server[Host]:
        # The members need each other's addresses before their hosts exist.
        first = len(self.network.hosts) + 1 - index
        host = self.network.add_host()
        name = f"etcd{index}"
        peers = ",".join(
            f"etcd{other}=http://{NETWORK}.{first + other}:{PEER_PORT}" for other in range(3)
        )
        own = f"http://{host.ip}"
        command = (
            *(
                debian_program("etcd", "etcd-server"),
                "--name",
                name,
                "--data-dir",
                str(self._folder / name),
            ),
            *("--listen-peer-urls", f"{own}:{PEER_PORT}"),
            *("--initial-advertise-peer-urls", f"{own}:{PEER_PORT}"),
            *("--listen-client-urls", f"{own}:{ETCD_PORT}"),
            *("--advertise-client-urls", f"{own}:{ETCD_PORT}"),
            *("--listen-metrics-urls", f"{own}:{METRICS_PORT}"),
            *("--initial-cluster", peers, "--logger", "zap"),
        )
        return Server(name, host, ETCD_PORT, command, self._folder / f"{name}.log")

    def _add(self, role: str, index: int, port: int, *flags: str) -> Server[Host]:
        host = self.network.add_host()
        name = f"{role}{index}"
        tls = ("--fabric-tls", str(self._certificates.issue(Role(role), name, life=_LIFE)))
        command = (*DUPLANE, role, "--listen", f"{host.ip}:{port}", *tls, *flags)
        return Server(name, host, port, command, self._folder / f"{name}.log")

    @classmethod
    @contextlib.asynccontextmanager
    async def running(cls, folder: Path) -> AsyncGenerator[Cluster]:
        """Start all processes together. Each process finds the others as soon as they listen."""
        cluster = cls(folder)
        try:
            for server in cluster.servers:
                server.start()
            await cluster.settled(START_S)
            yield cluster
        finally:
            cluster.network.close()

    # Observation.

    async def get(self, edge: Server[Host], path: str) -> tuple[int, dict[str, Any]]:
        """Return the status code and JSON of an edge's answer; code 0 if there is no answer."""
        return await self._get(edge.host.ip, edge.port, path)

    async def _get(self, ip: str, port: int, path: str) -> tuple[int, Any]:
        try:
            code, body = await self.fetch(ip, port, path)
        except OSError:
            return 0, {}
        return code, orjson.loads(body)

    async def fetch(self, ip: str, port: int, path: str) -> tuple[int, bytes]:
        socket = await self.client.connect(ip, port)

        def exchange() -> tuple[int, bytes]:
            connection = http.client.HTTPConnection(ip, port, timeout=10)
            connection.sock = socket
            try:
                connection.request("GET", path)
                answer = connection.getresponse()
                return answer.status, answer.read()
            finally:
                connection.close()

        return await asyncio.to_thread(exchange)

    async def statuses(self) -> Sequence[dict[str, Any]]:
        """Return each edge's `/status`; an empty object for an edge that does not answer."""
        answers = [await self.get(edge, "/status") for edge in self.edges]
        return [status if code == 200 else {} for code, status in answers]

    async def until_count(self, name: str, count: int, within_s: float = SETTLE_S) -> None:
        """Wait until `name` has the value `count` in the status of any edge."""

        async def is_reached() -> bool:
            return any(status.get(name) == count for status in await self.statuses())

        await until(is_reached, within_s)

    async def settled(self, within_s: float = SETTLE_S) -> None:
        """Wait until every edge reports that all slots are free, without leases and tickets."""
        expected = {"free_slot_count": len(self.workers), "lease_count": 0, "ticket_count": 0}
        seen: list[dict[str, Any]] = []

        async def is_settled() -> bool:
            seen[:] = await self.statuses()
            return all(expected.items() <= status.items() for status in seen)

        try:
            await until(is_settled, within_s)
        except TimeoutError:
            raise AssertionError(f"not settled within {within_s} s: {seen}") from None

    async def leader(self) -> Server[Host]:
        """Wait until a running etcd member reports that it is the leader, and return it."""
        found: list[Server[Host]] = []

        async def has_leader() -> bool:
            for member in self.etcd:
                if not member.is_running:
                    continue
                with contextlib.suppress(OSError):
                    _, page = await self.fetch(member.host.ip, METRICS_PORT, "/metrics")
                    if b"\netcd_server_is_leader 1\n" in page:
                        found.append(member)
                        return True
            return False

        await until(has_leader, START_S)
        return found[0]

    # Clients.

    @contextlib.asynccontextmanager
    async def connect(
        self, edge: int = 0, path: str = "/v1/realtime?mode=audio"
    ) -> AsyncGenerator[ClientConnection]:
        """Connect a client to an edge."""
        server = self.edges[edge]
        socket = await self.client.connect(server.host.ip, server.port, WITHIN_S)
        url = f"ws://{server.address}{path}"
        async with connect(url, sock=socket, compression=None, close_timeout=1) as connection:
            yield connection

    # Repair.

    async def repair(self) -> None:
        """Start killed processes, continue frozen ones, and wait until the fabric has settled."""
        for server in self.servers:
            if server.is_running:
                server.thaw()
            else:
                server.start()
        await self.settled(START_S)

    def logs(self) -> str:
        """Return the last lines of every process, without etcd."""
        parts: list[str] = []
        for server in self.servers:
            if server.log.exists() and not server.name.startswith("etcd"):
                lines = server.log.read_text(errors="replace").splitlines()[-15:]
                parts += [f"--- {server.name}", *lines]
        return "\n".join(parts)
