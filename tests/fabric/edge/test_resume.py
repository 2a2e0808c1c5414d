"""A client returns to its session on another socket of the same edge."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import orjson
import pytest
from support.edge.live_edge import AUDIO, HandSetClock, LiveEdge, live_edge, receive
from support.time_limits import WITHIN_S
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from duplane.edge.settings import Limits
from duplane.fabric.v1 import session_pb2

SAMPLES = 16_000


@dataclass(frozen=True)
class Speaker:
    """What the clients of one dialect say and hear."""

    path: str
    settings: dict[str, Any]
    ready: str
    append: dict[str, Any]
    prefix: str = "session."
    leave: str = "session.close"


A = Speaker(
    "/v1/realtime?mode=audio",
    {"type": "session.update", "session": {"instructions": "x", "resumable": True}},
    "session.created",
    {"type": "input_audio_buffer.append", "audio": AUDIO},
)
B = Speaker(
    "/v1/realtime?mode=audio",
    {"type": "session.init", "payload": {"resumable": True}},
    "session.created",
    {"type": "input.append", "input": {"audio": AUDIO}},
)
C = Speaker(
    "/ws/duplex/adx_1",
    {"type": "prepare", "resumable": True},
    "prepared",
    {"type": "audio_chunk", "audio_base64": AUDIO},
    prefix="",
    leave="stop",
)
SPEAKERS = {"a": A, "b": B, "c": C}


def spoken(unit: session_pb2.Unit) -> list[session_pb2.ConverseResponse]:
    """Speak in turns of two units, then listen to one."""
    number = unit.sequence
    delta = session_pb2.Delta(
        sequence=number, context_token_count=100 + number, state_change=session_pb2.StateChange()
    )
    if number % 3 == 2:
        delta.listen.SetInParent()
    else:
        delta.speech.text = f"word {number} "
        delta.speech.audio = number.to_bytes(4, "little") * 240
        delta.speech.sample_count = 240
        delta.end_of_turn = number % 3 == 1
    delta.token_counts.output_text_token_count = 3
    return [session_pb2.ConverseResponse(delta=delta)]


@dataclass
class Talker:
    """A client that counts the events of units, and loses its socket."""

    edge: LiveEdge
    speaker: Speaker
    sockets: contextlib.AsyncExitStack
    client: ClientConnection | None = None
    token: str = ""
    heard: list[dict[str, Any]] = field(default_factory=list)
    others: list[dict[str, Any]] = field(default_factory=list)

    @property
    def socket(self) -> ClientConnection:
        assert self.client is not None
        return self.client

    async def connect(self) -> None:
        self.client = await self.sockets.enter_async_context(
            self.edge.connect_to(self.speaker.path)
        )

    async def send(self, event: dict[str, Any]) -> None:
        await self.socket.send(orjson.dumps(event), text=True)

    async def until(self, kind: str) -> dict[str, Any]:
        """Read until an event of this type."""
        while True:
            event = await self.read()
            if event["type"] == self.speaker.prefix + kind:
                return event

    async def read(self) -> dict[str, Any]:
        event = await receive(self.socket)
        if "unit" in event and event["type"] != self.speaker.prefix + "resumed":
            self.heard.append(event)
        else:
            self.others.append(event)
        return event

    async def begin(self) -> None:
        await self.connect()
        await self.until("queue_done")
        await self.send(self.speaker.settings)
        ready = await self.until(self.speaker.ready.removeprefix(self.speaker.prefix))
        self.token = ready["resume"]["token"]
        assert ready["resume"]["within_s"] == Limits().resume_s

    async def unit(self) -> None:
        await self.send(self.speaker.append)

    async def until_unit(self, unit: int) -> None:
        while not self.heard or self.heard[-1]["unit"] < unit:
            await self.read()

    def lose(self) -> None:
        """Reset the connection."""
        self.socket.transport.abort()

    async def come_back(self, **changed: Any) -> dict[str, Any]:
        await self.connect()
        await self.send(self.resume(**changed))
        return await self.until("resumed")

    def resume(self, **changed: Any) -> dict[str, Any]:
        cursor = {key: self.heard[-1][key] for key in ("unit", "part")} if self.heard else {}
        kind = f"{self.speaker.prefix}resume"
        return {"type": kind, "token": self.token, **cursor, **changed}

    async def leave(self) -> None:
        await self.send({"type": self.speaker.leave})
        with contextlib.suppress(ConnectionClosed):
            while True:
                await self.read()

    def content(self) -> list[dict[str, Any]]:
        """Return the events of units without what depends on time and on sockets."""
        changing = ("server_send_ts", "replayed", "next_sample", "session_id", "response_id")
        return [
            {key: value for key, value in event.items() if key not in changing}
            for event in self.heard
        ]


@contextlib.asynccontextmanager
async def talking(edge: LiveEdge, speaker: Speaker) -> AsyncGenerator[Talker]:
    async with contextlib.AsyncExitStack() as sockets:
        talker = Talker(edge, speaker, sockets)
        await talker.begin()
        yield talker


async def detached(edge: LiveEdge, state: str = "held") -> None:
    """Wait until the edge has exactly one session without a socket in this state."""
    async with asyncio.timeout(WITHIN_S):
        while True:
            registry = edge.edge.metrics.registry
            if registry.get_sample_value("duplane_detached_sessions", {"state": state}):
                return
            await asyncio.sleep(0.01)


def resumes(edge: LiveEdge, outcome: str) -> float:
    registry = edge.edge.metrics.registry
    return registry.get_sample_value("duplane_resumes_total", {"outcome": outcome}) or 0.0


async def undisturbed(speaker: Speaker, count: int) -> Talker:
    async with live_edge(continuity="worker") as edge:
        edge.fabric.model_digest = "m"
        edge.fabric.on_unit = spoken
        async with talking(edge, speaker) as talker:
            for number in range(count):
                await talker.unit()
                await talker.until_unit(number)
            await talker.leave()
            return talker


@pytest.mark.parametrize("name", SPEAKERS)
async def test_client_that_loses_its_socket_hears_each_event_once(name: str) -> None:
    speaker = SPEAKERS[name]
    count = 7
    async with live_edge(continuity="worker") as edge:
        edge.fabric.model_digest = "m"
        edge.fabric.on_unit = spoken
        async with talking(edge, speaker) as talker:
            for number in range(count):
                await talker.unit()
                if number in (1, 4, 5):  # the answer comes while there is no socket
                    talker.lose()
                    await detached(edge)
                    resumed = await talker.come_back()
                    if resumed["next_sample"] == SAMPLES * number:
                        await talker.unit()  # it was lost with the socket
                    else:
                        assert resumed["next_sample"] == SAMPLES * (number + 1)
                    assert 0 <= resumed["gap_s"] < WITHIN_S
                await talker.until_unit(number)
            await talker.leave()
        assert resumes(edge, "same_edge") == 3
    places = [(event["unit"], event["part"]) for event in talker.heard]
    assert places == sorted(set(places))
    assert talker.content() == (await undisturbed(speaker, count)).content()
    samples = [event["next_sample"] for event in talker.heard]
    assert samples == sorted(samples)


async def test_turn_keeps_its_id_and_its_count_over_a_return() -> None:
    async with live_edge(continuity="worker") as edge:
        edge.fabric.model_digest = "m"
        edge.fabric.on_unit = spoken
        async with talking(edge, B) as talker:
            await talker.unit()
            await talker.until_unit(0)
            talker.lose()
            await detached(edge)
            await talker.come_back()
            await talker.unit()
            await talker.until_unit(1)
            turn = {event["response_id"] for event in talker.heard}
            assert len(turn) == 1
            await talker.leave()


@pytest.mark.parametrize("name", SPEAKERS)
async def test_socket_that_looks_alive_is_taken_over(name: str) -> None:
    async with live_edge(continuity="worker") as edge:
        edge.fabric.on_unit = spoken
        async with talking(edge, SPEAKERS[name]) as talker:
            await talker.unit()
            await talker.until_unit(0)
            former = talker.socket
            await talker.come_back()
            while (await receive(former))["type"] != f"{SPEAKERS[name].prefix}replaced":
                pass  # another event of the unit
            async with asyncio.timeout(WITHIN_S):
                await former.wait_closed()
            await talker.unit()
            await talker.until_unit(1)
            await talker.leave()


async def test_session_that_is_parked_gives_its_slot_back_and_goes_on_in_another() -> None:
    clock = HandSetClock()
    async with live_edge(continuity="worker", clock=clock) as edge:
        edge.fabric.model_digest = "m"
        edge.fabric.on_unit = spoken
        async with talking(edge, B) as talker:
            await talker.unit()
            await talker.until_unit(0)
            talker.lose()
            await detached(edge)
            clock.advance(Limits().hold_s)
            await detached(edge, "parked")
            async with asyncio.timeout(WITHIN_S):
                await edge.fabric.settled()
            resumed = await talker.come_back()
            assert resumed["gap_s"] == Limits().hold_s
            await talker.unit()
            await talker.until_unit(1)
            assert talker.heard[-1]["response_id"] == talker.heard[0]["response_id"]
            await talker.leave()
        assert resumes(edge, "rebuilt") == 1


async def test_session_of_a_client_that_stays_away_ends() -> None:
    clock = HandSetClock()
    async with live_edge(continuity="worker", clock=clock) as edge:
        edge.fabric.model_digest = "m"
        async with talking(edge, A) as talker:
            talker.lose()
            await detached(edge)
            clock.advance(Limits().hold_s)
            await detached(edge, "parked")
            clock.advance(Limits().resume_s)
            await edge.settled()
            await talker.connect()
            await talker.send(talker.resume())
            while (error := await talker.read())["type"] != "error":
                pass
            assert error["error"]["code"] == "resume_expired"


@pytest.mark.parametrize("name", SPEAKERS)
async def test_wrong_token_leaves_the_live_socket_alone(name: str) -> None:
    speaker = SPEAKERS[name]
    async with live_edge(continuity="worker", slot_count=2) as edge:
        edge.fabric.on_unit = spoken
        async with talking(edge, speaker) as talker, edge.connect_to(speaker.path) as other:
            wrong = talker.token[:-8] + "wrong___"
            await other.send(orjson.dumps(talker.resume(token=wrong)), text=True)
            event: dict[str, Any] = {}
            while event.get("type") != "error":
                event = await receive(other)
            assert "resume_refused" in orjson.dumps(event).decode()
            async with asyncio.timeout(WITHIN_S):
                await other.wait_closed()
            assert other.close_code == 1008
            await talker.unit()
            await talker.until_unit(0)
            await talker.leave()
        assert resumes(edge, "refused") == 1
