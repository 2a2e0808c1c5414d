"""Real edges, workers and a scheduler, and clients that return to their sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson
from support.edge.returning_client import ReturningClient
from support.fabric.mixed_fabric import MixedFabric, Server
from support.fabric.real_fabric import get_json
from support.time_limits import WITHIN_S, until
from websockets.asyncio.client import connect

from duplane.fabric.client import FabricClient
from duplane.fabric.v1 import admin_pb2

SLOTS = 3
"""Slots of a worker, if its flags do not say another number."""
_SAID = {"type", "unit", "part", "text", "audio", "delta", "audio_base64", "result", "kind"}


class Addressed(Protocol):
    """A server to which clients connect."""

    @property
    def address(self) -> str: ...


@dataclass
class Fabric:
    """A scheduler, its workers with SLOTS slots each, and edges."""

    processes: MixedFabric
    scheduler: Server
    edges: list[Server] = field(default_factory=list[Server])
    workers: list[Server] = field(default_factory=list[Server])

    async def add_edge(self, *flags: str) -> Server:
        address = self.scheduler.address
        edge = await self.processes.start("edge", "--scheduler", address, *flags, is_former=False)
        self.edges.append(edge)
        return edge

    async def add_worker(self, *flags: str) -> Server:
        model = ("--checkpoint", "scripted", "--slots", str(SLOTS))
        address = self.scheduler.address
        worker = await self.processes.start(
            "worker", "--scheduler", address, *model, *flags, is_former=False
        )
        self.workers.append(worker)
        return worker

    async def status(self, edge: Server) -> dict[str, Any]:
        return (await asyncio.to_thread(get_json, f"http://{edge.address}/status"))[1]

    async def all_free(self, edge: Server, slots: int = SLOTS) -> None:
        """Wait until no slot of the fabric is used."""

        async def is_free() -> bool:
            status = await self.status(edge)
            return status.get("free_slot_count") == slots and status["lease_count"] == 0

        await until(is_free, WITHIN_S)

    async def leases(self, caller: Caller) -> Sequence[str]:
        """Return the address of the worker of each lease of a session."""
        request = admin_pb2.ListLeasesRequest(session_id=caller.token.partition(".")[0])
        async with FabricClient([self.scheduler.address]) as operator:
            listed = await operator.administer(lambda admin: admin.ListLeases(request))
        return [one.worker_address for one in listed.leases]

    async def worker_of(self, caller: Caller) -> Server:
        """Return the worker that has the only slot of a session."""
        (address,) = await self.leases(caller)
        (worker,) = (worker for worker in self.workers if worker.address == address)
        return worker

    async def waits(self, edge: Server, count: int) -> None:
        """Wait until so many tickets wait for a slot."""

        async def has_tickets() -> bool:
            return (await self.status(edge)).get("ticket_count") == count

        await until(has_tickets, WITHIN_S)


@dataclass
class Caller(ReturningClient):
    """A client of an edge that is a process of its own."""

    async def connect(self, edge: Addressed) -> None:
        url = f"ws://{edge.address}{self.speaker.path}"
        self.client = await self.sockets.enter_async_context(connect(url))

    async def begin(self, edge: Addressed) -> None:
        await self.connect(edge)
        await self.open()

    async def ask(self, edge: Addressed, **changed: Any) -> dict[str, Any]:
        """Ask for the session on a new socket; return the answer."""
        await self.connect(edge)
        await self.send(self.request(**changed))
        return await self.until(f"{self.speaker.prefix}resumed", "error")

    async def come_back(self, edge: Addressed) -> dict[str, Any]:
        """Return until the session can be had."""
        while (answer := await self.ask(edge))["type"] == "error":
            assert "resume_busy" in orjson.dumps(answer).decode(), answer
        return answer

    @property
    def said(self) -> list[dict[str, Any]]:
        """What was heard, without what belongs to one session only."""
        return [_plain(event) for event in self.heard]


def _plain(event: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in event.items() if key in _SAID}
