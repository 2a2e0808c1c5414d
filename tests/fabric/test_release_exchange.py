"""A fabric whose processes are replaced one by one by those of the next release, or of the former.

A call lasts during the exchange, and each of its units is answered.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import orjson
import pytest
from support.fabric.mixed_fabric import MixedFabric, Server, former_environment
from support.fabric.real_fabric import Client
from support.ports import free_ports
from support.scheduler.etcd_server import EtcdCluster
from support.time_limits import WITHIN_S, until
from support.tools.command import run_command
from websockets.asyncio.client import connect

from duplane.fabric.releases import own_release

SCHEDULERS = ("scheduler 0", "scheduler 1")
WORKERS = ("worker 0", "worker 1")
UNIT_S = 0.25  # between two units: the context of the call has room for 680
# As the workers register them; the former release of `mixed_fabric` names none.
RELEASES = ("", own_release())


@dataclass
class Exchange:
    """Two schedulers with etcd and two workers with a slot each, whose releases change."""

    fabric: MixedFabric
    store: str
    schedulers: Sequence[str]
    is_back: bool
    servers: dict[str, Server] = field(default_factory=dict[str, Server])

    @property
    def at(self) -> tuple[str, str]:
        return ("--scheduler", ",".join(self.schedulers))

    async def start(self, name: str, *, is_former: bool) -> None:
        role = name.split()[0]
        flags: tuple[str, ...] = self.at
        listen = "127.0.0.1:0"
        match role:
            case "scheduler":
                flags, listen = ("--store", self.store), self.schedulers[int(name[-1])]
            case "worker":
                flags = (*self.at, "--checkpoint", "scripted", "--slots", "1")
            case _:
                pass
        self.servers[name] = await self.fabric.start(
            role, *flags, is_former=is_former, listen=listen
        )

    async def workers(self) -> list[str]:
        """Return the release of each ready worker."""
        code, text = await asyncio.to_thread(
            run_command, "status", "--json", "--scheduler", self.schedulers[0]
        )
        rows = orjson.loads(text)["workers"] if not code else []
        return sorted(
            row["worker"].get("release", "") for row in rows if not row.get("lost_duration")
        )

    async def until_workers(self, *releases: str) -> None:
        async def are_listed() -> bool:
            return await self.workers() == sorted(releases)

        await until(are_listed, WITHIN_S)

    async def replace(self, name: str) -> None:
        await self.servers[name].stop()
        await self.start(name, is_former=self.is_back)

    async def replace_workers(self, client: Client) -> None:
        old, new = RELEASES[:: -1 if self.is_back else 1]
        for name, releases in zip(WORKERS, ((old, new), (new, new)), strict=True):
            await during(self.replace(name), client)
            await during(self.until_workers(*releases), client)

    async def replace_schedulers(self, client: Client) -> None:
        for name in SCHEDULERS:
            await during(self.replace(name), client)

    @contextlib.asynccontextmanager
    async def call(self, edge: str) -> AsyncGenerator[Client]:
        url = f"ws://{self.servers[edge].address}/v1/realtime?mode=audio"
        async with connect(url, proxy=None, max_size=None) as connection:
            client = Client(connection)
            await client.begin()
            yield client
            await client.end()


async def during(awaitable: Awaitable[None], client: Client) -> None:
    """Exchange units until something is done, and two units more."""
    task = asyncio.ensure_future(awaitable)
    while not task.done():
        await client.exchange()
        await asyncio.wait({task}, timeout=UNIT_S)
    await task
    for _ in range(2):
        await client.exchange()


@contextlib.asynccontextmanager
async def running(folder: Path, *, is_back: bool) -> AsyncGenerator[Exchange]:
    """Start a fabric of the former release; with `is_back`, of this release."""
    former = former_environment(folder / "former")
    async with (
        EtcdCluster.running(folder / "etcd") as etcd,
        MixedFabric.starting(former) as fabric,
    ):
        schedulers = [f"127.0.0.1:{port}" for port in free_ports(2)]
        exchange = Exchange(fabric, etcd.url("/exchange"), schedulers, is_back=is_back)
        for name in (*SCHEDULERS, *WORKERS, "edge 0"):
            await exchange.start(name, is_former=not is_back)
        yield exchange


@pytest.mark.slow
@pytest.mark.parametrize("is_back", [False, True], ids=["to the next release", "back"])
async def test_every_process_is_replaced_during_a_call(tmp_path: Path, is_back: bool) -> None:
    async with running(tmp_path, is_back=is_back) as exchange:
        async with exchange.call("edge 0") as client:
            await client.exchange()
            if not is_back:
                await exchange.replace_workers(client)
                await exchange.replace_schedulers(client)
            await exchange.start("edge 1", is_former=is_back)
            stopping = asyncio.ensure_future(exchange.servers["edge 0"].stop())
            for _ in range(3):
                await client.exchange()
            assert not stopping.done(), "the edge waits until its session has ended"
        await stopping
        async with exchange.call("edge 1") as client:
            await client.exchange()
            if is_back:
                await exchange.replace_schedulers(client)
                await exchange.replace_workers(client)
