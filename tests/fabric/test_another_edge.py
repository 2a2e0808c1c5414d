"""Calls that go on at another edge: real edges, workers and a scheduler, which are killed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import orjson
import pybase64
import pytest
from support.fabric.mixed_fabric import MixedFabric, Server
from support.fabric.real_fabric import get_json
from support.time_limits import WITHIN_S, until
from support.worker.worker_harness import pcm
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

AUDIO = pybase64.b64encode(pcm(0.5)).decode()
SAMPLES = 16_000
SLOTS = 3


@dataclass(frozen=True)
class Speaker:
    """What the clients of one dialect say and hear."""

    path: str
    settings: dict[str, Any]
    ready: str
    append: dict[str, Any]
    prefix: str = "session."
    leave: str = "session.close"


SPEAKERS = {
    "a": Speaker(
        "/v1/realtime?mode=audio",
        {"type": "session.update", "session": {"instructions": "x", "resumable": True}},
        "session.created",
        {"type": "input_audio_buffer.append", "audio": AUDIO},
    ),
    "b": Speaker(
        "/v1/realtime?mode=audio",
        {"type": "session.init", "payload": {"resumable": True}},
        "session.created",
        {"type": "input.append", "input": {"audio": AUDIO}},
    ),
    "c": Speaker(
        "/ws/duplex/adx_1",
        {"type": "prepare", "resumable": True},
        "prepared",
        {"type": "audio_chunk", "audio_base64": AUDIO},
        prefix="",
        leave="stop",
    ),
}
_SAID = {"type", "unit", "part", "text", "audio", "delta", "audio_base64", "result", "kind"}


@dataclass
class Fabric:
    """A scheduler, a worker with SLOTS slots, and two edges."""

    processes: MixedFabric
    scheduler: Server
    edges: list[Server] = field(default_factory=list[Server])

    async def add_edge(self, *flags: str) -> Server:
        address = self.scheduler.address
        edge = await self.processes.start("edge", "--scheduler", address, *flags, is_former=False)
        self.edges.append(edge)
        return edge

    async def add_worker(self, *flags: str) -> Server:
        model = ("--checkpoint", "scripted", "--slots", str(SLOTS))
        address = self.scheduler.address
        return await self.processes.start(
            "worker", "--scheduler", address, *model, *flags, is_former=False
        )

    async def all_free(self, edge: Server) -> None:
        """Wait until no slot of the fabric is used."""

        async def is_free() -> bool:
            status = (await asyncio.to_thread(get_json, f"http://{edge.address}/status"))[1]
            return status.get("free_slot_count") == SLOTS and status["lease_count"] == 0

        await until(is_free, WITHIN_S)

    async def waits(self, edge: Server, count: int) -> None:
        """Wait until so many tickets wait for a slot."""

        async def has_tickets() -> bool:
            status = (await asyncio.to_thread(get_json, f"http://{edge.address}/status"))[1]
            return status.get("ticket_count") == count

        await until(has_tickets, WITHIN_S)


@pytest.fixture(scope="module")
async def fabric() -> AsyncGenerator[Fabric]:
    async with MixedFabric.starting({}) as processes:
        scheduler = await processes.start("scheduler", is_former=False)
        fabric = Fabric(processes, scheduler)
        await asyncio.gather(fabric.add_worker(), fabric.add_edge(), fabric.add_edge())
        yield fabric


@dataclass
class Caller:
    """A client that notes the events of units, and names the last one when it returns."""

    speaker: Speaker
    sockets: contextlib.AsyncExitStack
    client: ClientConnection | None = None
    token: str = ""
    heard: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    @property
    def socket(self) -> ClientConnection:
        assert self.client is not None
        return self.client

    async def connect(self, edge: Server) -> None:
        url = f"ws://{edge.address}{self.speaker.path}"
        self.client = await self.sockets.enter_async_context(connect(url))

    async def send(self, event: dict[str, Any]) -> None:
        await self.socket.send(orjson.dumps(event), text=True)

    async def read(self) -> dict[str, Any]:
        async with asyncio.timeout(WITHIN_S):
            event = orjson.loads(await self.socket.recv())
        if "unit" in event and event["type"] != self.speaker.prefix + "resumed":
            self.heard.append(event)
        return event

    async def until(self, *kinds: str) -> dict[str, Any]:
        while (event := await self.read())["type"] not in kinds:
            pass
        return event

    async def begin(self, edge: Server) -> None:
        await self.connect(edge)
        await self.until(self.speaker.prefix + "queue_done")
        await self.send(self.speaker.settings)
        self.token = (await self.until(self.speaker.ready))["resume"]["token"]

    async def units(self, count: int) -> None:
        """Send units one after the other, and read their events."""
        for _ in range(count):
            last = self.heard[-1]["unit"] if self.heard else -1
            await self.send(self.speaker.append)
            await self.until_unit(last + 1)

    async def until_unit(self, unit: int) -> None:
        while not self.heard or self.heard[-1]["unit"] < unit:
            await self.read()

    async def ask(self, edge: Server, **changed: Any) -> dict[str, Any]:
        """Ask for the session on a new socket; return the answer."""
        prefix = self.speaker.prefix
        cursor = {key: self.heard[-1][key] for key in ("unit", "part")} if self.heard else {}
        request = {"type": f"{prefix}resume", "token": self.token, **cursor, **changed}
        await self.connect(edge)
        await self.send(request)
        return await self.until(f"{prefix}resumed", "error")

    async def come_back(self, edge: Server) -> dict[str, Any]:
        """Return until the session can be had."""
        while (answer := await self.ask(edge))["type"] == "error":
            assert "resume_busy" in orjson.dumps(answer).decode(), answer
        return answer

    async def end(self) -> None:
        await self.send({"type": self.speaker.leave})
        with contextlib.suppress(ConnectionClosed):
            while True:
                await self.read()

    @property
    def said(self) -> list[dict[str, Any]]:
        """What was heard, without what belongs to one session only."""
        return [_plain(event) for event in self.heard]


def _plain(event: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in event.items() if key in _SAID}


@pytest.fixture
async def sockets() -> AsyncGenerator[contextlib.AsyncExitStack]:
    async with contextlib.AsyncExitStack() as stack:
        yield stack


@pytest.fixture
def caller(sockets: contextlib.AsyncExitStack) -> Caller:
    return Caller(SPEAKERS["b"], sockets)


@pytest.mark.slow
async def test_calls_go_on_at_another_edge_when_their_edge_is_killed(
    fabric: Fabric, sockets: contextlib.AsyncExitStack
) -> None:
    former, other = await fabric.add_edge(), fabric.edges[0]
    undisturbed = [Caller(speaker, sockets) for speaker in SPEAKERS.values()]
    callers = [Caller(speaker, sockets) for speaker in SPEAKERS.values()]
    for caller in undisturbed:
        await caller.begin(other)
        await caller.units(6)
        await caller.end()
    for caller in callers:
        await caller.begin(former)
        await caller.units(3)
    await former.kill()
    for number, caller in enumerate(callers):
        told = caller.said
        del caller.heard[number:]  # as if the last events were lost
        answer = await caller.come_back(other)
        assert (answer["unit"], answer["next_sample"]) == (2, 3 * SAMPLES)
        while len(caller.heard) < len(told):
            await caller.read()
        assert caller.said[: len(told)] == told
        assert all(event["replayed"] for event in caller.heard[number : len(told)])
        await caller.units(3)
        await caller.end()
    assert [caller.said for caller in callers] == [caller.said for caller in undisturbed]
    await fabric.all_free(other)


@pytest.mark.slow
async def test_former_socket_is_replaced_while_its_edge_lives(
    fabric: Fabric, caller: Caller
) -> None:
    first, second = fabric.edges[:2]
    await caller.begin(first)
    await caller.units(2)
    for edge in (second, first, second):
        former = caller.socket
        await caller.come_back(edge)
        async with asyncio.timeout(WITHIN_S):
            events = [orjson.loads(message) async for message in former]
        assert events[-1]["type"] == "session.replaced"
        await caller.units(1)
    assert [event["unit"] for event in caller.heard if event["part"] == 0] == [0, 1, 2, 3, 4]
    await caller.end()
    await fabric.all_free(second)


@pytest.mark.slow
async def test_edge_refuses_a_session_of_another_edge_with_a_wrong_token(
    fabric: Fabric, caller: Caller
) -> None:
    first, second = fabric.edges[:2]
    await caller.begin(first)
    await caller.units(1)
    live = caller.socket
    session_id = caller.token.partition(".")[0]
    for changed, code in [
        ({"token": f"{session_id}.wrong"}, "resume_refused"),
        ({"unit": 7, "part": 0}, "resume_stale"),
        ({"token": "sess_unknown.x"}, "resume_lost"),
    ]:
        answer = await caller.ask(second, **changed)
        assert code in orjson.dumps(answer).decode(), answer
        await caller.socket.wait_closed()
        assert caller.socket.close_code == 1008
    caller.client = live  # nothing has changed for the session
    await caller.units(1)
    await caller.end()
    await fabric.all_free(first)


@pytest.mark.slow
async def test_session_without_a_slot_is_rebuilt_by_the_other_edge(
    fabric: Fabric, caller: Caller
) -> None:
    former, other = await fabric.add_edge("--hold-s", "0.05"), fabric.edges[0]
    await caller.begin(former)
    await caller.units(3)
    await former.kill()
    await fabric.all_free(other)
    assert (await caller.come_back(other))["next_sample"] == 3 * SAMPLES
    await caller.units(2)
    assert [event["unit"] for event in caller.heard if event["part"] == 0] == [0, 1, 2, 3, 4]
    await caller.end()
    await fabric.all_free(other)


@pytest.mark.slow
async def test_session_without_a_slot_comes_before_later_clients_at_the_other_edge(
    fabric: Fabric, caller: Caller, sockets: contextlib.AsyncExitStack
) -> None:
    former, other = await fabric.add_edge("--hold-s", "0.05"), fabric.edges[0]
    await caller.begin(former)
    await caller.units(1)
    await former.kill()
    await fabric.all_free(other)
    holders = [Caller(SPEAKERS["b"], sockets) for _ in range(SLOTS)]
    for holder in holders:
        await holder.begin(other)
    later = Caller(SPEAKERS["b"], sockets)
    await later.connect(other)
    await later.until("session.queued")
    await caller.come_back(other)
    await fabric.waits(other, 2)
    await holders[0].end()
    await caller.units(1)
    await fabric.waits(other, 1)
    await caller.end()
    await later.until("session.queue_done")
    await later.send(later.speaker.settings)
    await later.until(later.speaker.ready)
    for client in (later, *holders[1:]):
        await client.end()
    await fabric.all_free(other)


@pytest.mark.slow
async def test_session_whose_edge_and_worker_are_killed_is_lost(
    fabric: Fabric, caller: Caller
) -> None:
    pool = ("--pool", "other")
    edge, worker = await asyncio.gather(fabric.add_edge(*pool), fabric.add_worker(*pool))
    await caller.begin(edge)
    await caller.units(1)
    await edge.kill()
    await worker.kill()
    while "resume_busy" in (answer := orjson.dumps(await caller.ask(fabric.edges[0])).decode()):
        pass  # the scheduler still has the lease
    assert "resume_lost" in answer
