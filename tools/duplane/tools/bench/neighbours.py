"""`duplane bench neighbours`: what clients that misbehave cost the good clients beside them.

Uses real processes. The time limits of the edge are short, so that each of them expires during the
run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import orjson
import pybase64
import soundfile  # pyright: ignore[reportMissingTypeStubs]  it ships none
from websockets.asyncio.client import ClientConnection, connect

from duplane.fabric.client import FabricClient
from duplane.fabric.v1 import admin_pb2
from duplane.tools.bench.bad_clients import KINDS, Kind
from duplane.tools.bench.report import percentile, show
from duplane.tools.up.fabric import Fabric, UpSettings, running

_WAITS = ("HANDSHAKE", "INIT", "SEND", "PING", "HTTP")
_WITNESSES = 2
_PAUSE_S = 0.1  # between two units of a good client; this is ten times as fast as speech
_WATCH_S = 0.2
_VOICE_S = 60
_SILENCE = bytes(64_000)


@dataclass
class _Watch:
    """Observations of an edge from outside: its memory and its slots."""

    process_id: int
    rss_bytes: list[int] = field(default_factory=list[int])
    is_taken: bool = False  # whether bad clients ever held a slot
    free_s: float | None = None  # seconds until bad clients held no slot

    def freed(self) -> str:
        """Return the time until the slots were free again, as a cell of the table."""
        if not self.is_taken:
            return ""
        return "held" if self.free_s is None else f"{self.free_s:.1f}"

    def look(self) -> int:
        pages = int(Path(f"/proc/{self.process_id}/statm").read_text().split()[1])
        self.rss_bytes.append(pages * os.sysconf("SC_PAGE_SIZE"))
        return self.rss_bytes[-1]


class _Witness:
    """A good session of dialect B that sends silence. Its latencies show what bad clients cost."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        audio = pybase64.b64encode_as_string(_SILENCE)
        unit = {"type": "input.append", "input": {"audio": audio, "force_listen": True}}
        self._unit = orjson.dumps(unit)

    @classmethod
    @contextlib.asynccontextmanager
    async def opened(cls, edge: str) -> AsyncGenerator[_Witness]:
        url = f"ws://{edge}/v1/realtime?mode=audio"
        async with connect(url, compression=None) as connection:
            await connection.send(orjson.dumps({"type": "session.init", "payload": {}}), text=True)
            async for message in connection:
                if orjson.loads(message)["type"] == "session.created":
                    break
            yield cls(connection)

    async def exchange(self) -> float:
        """Send one unit and wait for its answer; return the worker's own time in milliseconds."""
        await self._connection.send(self._unit, text=True)
        return orjson.loads(await self._connection.recv())["metrics"]["wall_clock_ms"]


async def _witness(paths: list[_Witness], seconds: float) -> list[float]:
    """Run the good clients for `seconds`; return the milliseconds added to each of their units."""
    times: list[float] = []

    async def speak(path: _Witness) -> None:
        until = time.perf_counter() + seconds
        while (begin := time.perf_counter()) < until:
            worker_ms = await path.exchange()
            times.append((time.perf_counter() - begin) * 1e3 - worker_ms)
            await asyncio.sleep(_PAUSE_S)

    async with asyncio.TaskGroup() as tasks:
        for path in paths:
            tasks.create_task(speak(path))
    return times


async def _lease_count(client: FabricClient) -> int:
    wish = admin_pb2.ListLeasesRequest()
    return len((await client.administer(lambda admin: admin.ListLeases(wish))).leases)


async def _look(watch: _Watch, client: FabricClient) -> None:
    """Watch memory and slots until cancelled."""
    begin = time.perf_counter()
    while True:
        watch.look()
        if await _lease_count(client) > _WITNESSES:
            watch.is_taken, watch.free_s = True, None
        elif watch.free_s is None:
            watch.free_s = time.perf_counter() - begin
        await asyncio.sleep(_WATCH_S)


@contextlib.asynccontextmanager
async def _bad_clients(name: str, count: int, address: str) -> AsyncGenerator[None]:
    """Run bad clients in a separate process for the body of the `with`."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "duplane.tools.bench.bad_clients", name, str(count), address),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin
    assert process.stdout
    try:
        await process.stdout.readline()
        yield
    finally:
        process.stdin.close()
        await process.wait()


class _Bench:
    """Measures one kind of bad clients after the other, with one fabric."""

    def __init__(self, fabric: Fabric, client: FabricClient, seconds: float) -> None:
        self._fabric = fabric
        self._client = client
        self._seconds = seconds

    async def row(self, name: str, kind: Kind, count: int) -> tuple[str, ...]:
        """Measure without bad clients, then with them. Then wait until their slots are free."""
        watch = _Watch(self._fabric.roles[0].process_id)
        before_bytes = watch.look()
        async with contextlib.AsyncExitStack() as stack:
            paths = [  # new sessions for each row, because contexts fill up
                await stack.enter_async_context(_Witness.opened(self._fabric.edge))
                for _ in range(_WITNESSES)
            ]
            alone = await _witness(paths, self._seconds)
            async with _bad_clients(name, count, self._fabric.edge):
                looking = asyncio.ensure_future(_look(watch, self._client))
                beside = await _witness(paths, self._seconds)
                looking.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await looking
            await self._until_free()
        memory = (before_bytes, max(watch.rss_bytes), watch.look())
        return (
            *(kind.about, str(count)),
            *(f"{size / 1e6:.0f}" for size in memory),
            watch.freed(),
            *(
                f"{percentile(times, share):.1f}"
                for share in (0.5, 0.99)
                for times in (alone, beside)
            ),
        )

    async def _until_free(self) -> None:
        while True:
            if await _lease_count(self._client) <= _WITNESSES:
                return
            await asyncio.sleep(_WATCH_S)


async def bench_neighbours(
    settings: UpSettings, kinds: list[str], wait_s: float, seconds: float, connections: int
) -> None:
    """Start a fabric, measure each kind of client, and print the table."""
    with tempfile.TemporaryDirectory(prefix="duplane-bench-") as directory:
        voice = Path(directory) / "voice.wav"
        soundfile.write(voice, np.zeros(16_000 * _VOICE_S, "f4"), 16_000)
        os.environ["DUPLANE_DEFAULT_VOICE"] = str(voice)
        os.environ.update({f"DUPLANE_{wait}_S": str(wait_s) for wait in _WAITS})
        rows: list[tuple[str, ...]] = []
        async with running(settings) as fabric, FabricClient([fabric.scheduler]) as client:
            bench = _Bench(fabric, client, seconds)
            for name in kinds:
                kind = KINDS[name]
                count = fabric.slot_count - _WITNESSES if kind.takes_slots else connections
                rows.append(await bench.row(name, kind, count))
                sys.stderr.write(f"{' '.join(rows[-1])}\n")
    show(
        f"beside {_WITNESSES} good sessions; every time limit of the edge at {wait_s:g} s;"
        " MB of the edge; ms that the fabric adds to a unit of a good session, without and with",
        (
            *("", "clients", "MB before", "peak", "after", "slots free, s"),
            *("p50", "with", "p99", "with"),
        ),
        rows,
    )
