"""`duplane bench fabric`: the time that the fabric adds to the model, with real processes.

Every session sends its next unit when the last is answered. Units force the model to listen, so
that the model takes little time and the fabric's share is visible.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

import orjson
import pybase64
from websockets.asyncio.client import ClientConnection, connect

from duplane.fabric.client import ConverseStream, FabricClient
from duplane.fabric.v1 import lease_pb2, session_pb2
from duplane.tools.bench.report import percentile, show
from duplane.tools.up.fabric import UpSettings, running

_GRANTS = 200
_SILENCE = bytes(64_000)


@dataclass
class _Times:
    """Times of one path and number of sessions, in milliseconds."""

    wall: list[float] = field(default_factory=list[float])
    worker: list[float] = field(default_factory=list[float])

    def row(self, name: str) -> tuple[str, ...]:
        added = [wall - worker for wall, worker in zip(self.wall, self.worker, strict=True)]
        figures = (
            (self.wall, 0.5), (self.wall, 0.99), (self.worker, 0.5), (added, 0.5), (added, 0.99)
        )  # fmt: skip
        return (name, *(f"{percentile(values, share):.2f}" for values, share in figures))


class _Path(Protocol):
    """One open session."""

    async def exchange(self, number: int) -> float:
        """Send one unit, wait for its answer; return the worker's own milliseconds."""
        ...


class _Grpc:
    def __init__(self, stream: ConverseStream) -> None:
        self._stream = stream

    @classmethod
    @contextlib.asynccontextmanager
    async def opened(cls, client: FabricClient) -> AsyncGenerator[_Path]:
        async with client.session(_wish()) as stream:
            await stream.open(session_pb2.Open())
            yield cls(stream)

    async def exchange(self, number: int) -> float:
        unit = session_pb2.Unit(sequence=number, audio=_SILENCE, force_listen=True)
        await self._stream.send(unit)
        return (await self._stream.read()).delta.stage_times.total.ToMicroseconds() / 1e3


class WebSocketPath:
    """One open session of dialect B."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        audio = pybase64.b64encode_as_string(_SILENCE)
        unit = {"type": "input.append", "input": {"audio": audio, "force_listen": True}}
        self._unit = orjson.dumps(unit)

    @classmethod
    @contextlib.asynccontextmanager
    async def opened(cls, edge: str) -> AsyncGenerator[WebSocketPath]:
        url = f"ws://{edge}/v1/realtime?mode=audio"
        async with connect(url, compression=None) as connection:
            await connection.send(orjson.dumps({"type": "session.init", "payload": {}}), text=True)
            async for message in connection:
                if orjson.loads(message)["type"] == "session.created":
                    break
            yield cls(connection)

    async def exchange(self, number: int) -> float:
        """Send one unit, wait for its answer; return the worker's own milliseconds."""
        del number
        await self._connection.send(self._unit, text=True)
        return orjson.loads(await self._connection.recv())["metrics"]["wall_clock_ms"]


def _wish() -> lease_pb2.AcquireLeaseRequest:
    kind = lease_pb2.SESSION_KIND_AUDIO_DUPLEX
    return lease_pb2.AcquireLeaseRequest(request_id=str(uuid.uuid4()), kind=kind)


async def _grants(client: FabricClient) -> list[float]:
    times: list[float] = []
    for _ in range(_GRANTS):
        begin = time.perf_counter()
        granted = await client.acquire(_wish())
        times.append((time.perf_counter() - begin) * 1e3)
        await client.release(granted.lease_id)
    return times


async def _converse(
    open_path: Callable[[], AbstractAsyncContextManager[_Path]], session_count: int, units: int
) -> _Times:
    times = _Times()
    ready = asyncio.Barrier(session_count)

    async def converse() -> None:
        async with open_path() as path:
            await ready.wait()
            for number in range(units):
                begin = time.perf_counter()
                worker = await path.exchange(number)
                times.wall.append((time.perf_counter() - begin) * 1e3)
                times.worker.append(worker)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(session_count):
            tasks.create_task(converse())
    return times


async def bench_fabric(settings: UpSettings, units: int) -> None:
    """Start a fabric of its own, measure and print."""
    async with running(settings) as fabric, FabricClient([fabric.scheduler]) as client:
        grants = await _grants(client)
        show(
            "request to grant with a free slot, ms",
            ("", "p50", "p99", "budget p50"),
            [(f"{_GRANTS} grants", *(f"{percentile(grants, q):.2f}" for q in (0.5, 0.99)), "2.00")],
        )
        rows: list[tuple[str, ...]] = []
        session_count = 1
        while session_count <= fabric.slot_count:
            for name, open_path in (
                ("gRPC", lambda: _Grpc.opened(client)),
                ("WebSocket", lambda: WebSocketPath.opened(fabric.edge)),
            ):
                times = await _converse(open_path, session_count, units)
                rows.append(times.row(f"{name}, {session_count} at once"))
            session_count *= 2
        show(
            f"{units} listening units a session, next when answered; ms",
            ("", "unit p50", "unit p99", "worker p50", "added p50", "added p99"),
            rows,
        )
