"""Real etcd clusters on loopback, whose members can be killed, frozen and restarted."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import urllib.request
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path

from support.debian_programs import debian_program
from support.ports import free_ports

START_S = 60.0


class Member:
    """One etcd process, with the same ports and data after a restart."""

    def __init__(self, command: Sequence[str], address: str, metrics: str) -> None:
        self.address = address
        self._metrics = metrics
        self.command = command
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        environment = {name: value for name, value in os.environ.items() if "ETCD_" not in name}
        self._process = subprocess.Popen(
            self.command,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def kill(self) -> None:
        """End the process immediately, even if it is frozen."""
        if self._process:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        assert self._process
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process
        self._process.send_signal(signal.SIGCONT)

    def is_leader(self) -> bool:
        """Return whether the member reports that it is the leader; False if it does not answer."""
        return b"\netcd_server_is_leader 1\n" in self._page("metrics")

    def is_healthy(self) -> bool:
        """Return whether the member reports that its cluster executes requests."""
        return b'"true"' in self._page("health")

    def database_bytes(self) -> float:
        """Return the size of the member's database file."""
        lines = self._page("metrics").decode().splitlines()
        name = "etcd_mvcc_db_total_size_in_bytes "
        return next(float(line.split()[1]) for line in lines if line.startswith(name))

    def _page(self, name: str) -> bytes:
        try:
            with urllib.request.urlopen(f"{self._metrics}/{name}", timeout=1) as page:
                return page.read()
        except OSError:
            return b""


class EtcdCluster:
    """A cluster of one or more members."""

    def __init__(self, folder: Path, count: int = 1, flags: Sequence[str] = ()) -> None:
        program = debian_program("etcd", "etcd-server")
        scheme = "https" if "--cert-file" in flags else "http"
        ports = [f"127.0.0.1:{port}" for port in free_ports(3 * count)]
        peers, clients, metrics = ports[:count], ports[count : 2 * count], ports[2 * count :]
        initial = ",".join(f"m{index}=http://{peer}" for index, peer in enumerate(peers))
        self.members = [
            Member(
                [
                    program,
                    *("--name", f"m{index}", "--data-dir", str(folder / f"m{index}")),
                    *("--listen-peer-urls", f"http://{peers[index]}"),
                    *("--initial-advertise-peer-urls", f"http://{peers[index]}"),
                    *("--listen-client-urls", f"{scheme}://{clients[index]}"),
                    *("--advertise-client-urls", f"{scheme}://{clients[index]}"),
                    *("--listen-metrics-urls", f"http://{metrics[index]}"),
                    *("--initial-cluster", initial, "--logger", "zap", *flags),
                ],
                clients[index],
                f"http://{metrics[index]}",
            )
            for index in range(count)
        ]

    @property
    def addresses(self) -> Sequence[str]:
        return [member.address for member in self.members]

    def url(self, prefix: str) -> str:
        return f"etcd://{','.join(self.addresses)}?prefix={prefix}"

    async def leader(self) -> Member:
        """Wait until the cluster has a leader, and return it."""
        return await self._first(Member.is_leader)

    async def start(self) -> None:
        """Start every member and wait until the cluster executes requests."""
        for member in self.members:
            member.start()
        await self._first(Member.is_healthy)

    async def restart(self, member: Member) -> None:
        """Start a killed member and wait until it executes requests."""
        member.start()
        await self._first(Member.is_healthy, [member])

    async def _first(
        self, has_state: Callable[[Member], bool], members: Sequence[Member] = ()
    ) -> Member:
        """Wait until a member satisfies a condition, and return this member.

        Polls `members`, or all members of the cluster, because members report no changes.
        """
        async with asyncio.timeout(START_S):
            while True:
                for member in members or self.members:
                    if await asyncio.to_thread(has_state, member):
                        return member
                await asyncio.sleep(0.02)

    def kill(self) -> None:
        for member in self.members:
            member.kill()

    @classmethod
    @contextlib.asynccontextmanager
    async def running(
        cls, folder: Path, count: int = 1, flags: Sequence[str] = ()
    ) -> AsyncGenerator[EtcdCluster]:
        cluster = cls(folder, count, flags)
        try:
            await cluster.start()
            yield cluster
        finally:
            cluster.kill()
