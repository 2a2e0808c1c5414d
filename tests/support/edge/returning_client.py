"""A client of dialect A, B or C that loses its socket and returns, at a live edge."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from support.edge.live_edge import AUDIO, HandSetClock, LiveEdge, live_edge, receive, send
from support.time_limits import WITHIN_S, until
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
class ReturningClient:
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

    async def send(self, event: dict[str, Any]) -> None:
        await send(self.socket, event)

    async def read(self) -> dict[str, Any]:
        event = await receive(self.socket)
        if "unit" in event and event["type"] != self.speaker.prefix + "resumed":
            self.heard.append(event)
        return event

    async def until(self, *kinds: str) -> dict[str, Any]:
        """Read until an event of one of these types."""
        while (event := await self.read())["type"] not in kinds:
            pass
        return event

    async def until_told(self, notice: str) -> dict[str, Any]:
        """Read until an event about the session or its socket, with the prefix of the dialect."""
        return await self.until(self.speaker.prefix + notice)

    async def open(self) -> dict[str, Any]:
        """Open the conversation when the socket has its slot. Return the event that tells it."""
        await self.until_told("queue_done")
        await self.send(self.speaker.settings)
        ready = await self.until(self.speaker.ready)
        self.token = ready["resume"]["token"]
        return ready

    async def unit(self) -> None:
        await self.send(self.speaker.append)

    async def until_unit(self, unit: int) -> None:
        while not self.heard or self.heard[-1]["unit"] < unit:
            await self.read()

    async def units(self, count: int) -> None:
        """Send units one after the other, and read their events."""
        for _ in range(count):
            last = self.heard[-1]["unit"] if self.heard else -1
            await self.unit()
            await self.until_unit(last + 1)

    def request(self, **changed: Any) -> dict[str, Any]:
        """Return the event that asks for the session."""
        cursor = {key: self.heard[-1][key] for key in ("unit", "part")} if self.heard else {}
        kind = f"{self.speaker.prefix}resume"
        return {"type": kind, "token": self.token, **cursor, **changed}

    async def lose(self) -> None:
        """Reset the connection."""
        self.socket.transport.abort()
        await self.socket.wait_closed()

    async def end(self) -> None:
        await self.send({"type": self.speaker.leave})
        with contextlib.suppress(ConnectionClosed):
            while True:
                await self.read()


@dataclass
class Talker(ReturningClient):
    """A client of a live edge."""

    edge: LiveEdge = field(kw_only=True)

    async def connect(self) -> None:
        opening = self.edge.connect_to(self.speaker.path)
        self.client = await self.sockets.enter_async_context(opening)

    async def begin(self) -> None:
        await self.connect()
        ready = await self.open()
        assert ready["resume"]["within_s"] == Limits().resume_s

    async def until_error(self) -> str:
        """Read until an error, and return its code and message."""
        error = (await self.until("error"))["error"]
        return error if isinstance(error, str) else f"{error['code']}: {error['message']}"

    async def come_back(self, **changed: Any) -> dict[str, Any]:
        await self.connect()
        await self.send(self.request(**changed))
        return await self.until_told("resumed")

    async def lose_socket(self) -> None:
        """Reset the connection, and wait until the edge has noticed it."""
        await self.lose()
        await detached(self.edge)

    async def park(self, clock: HandSetClock) -> None:
        """Be away until the session has given its slot back."""
        await self.lose_socket()
        clock.advance(Limits().hold_s)
        await detached(self.edge, "parked")

    def content(self) -> list[dict[str, Any]]:
        """Return the events of units without what depends on time and on sockets."""
        changing = ("server_send_ts", "replayed", "next_sample", "session_id", "response_id")
        turns = list(dict.fromkeys(event.get("response_id") for event in self.heard))
        return [
            {key: value for key, value in event.items() if key not in changing}
            | {"turn": turns.index(event.get("response_id"))}
            for event in self.heard
        ]


@contextlib.asynccontextmanager
async def talking(edge: LiveEdge, speaker: Speaker) -> AsyncGenerator[Talker]:
    async with contextlib.AsyncExitStack() as sockets:
        talker = Talker(speaker, sockets, edge=edge)
        await talker.begin()
        yield talker


@contextlib.asynccontextmanager
async def speaking_edge(**settings: Any) -> AsyncGenerator[LiveEdge]:
    """Run an edge whose sessions can move, with a worker that answers as `spoken`."""
    async with live_edge(continuity="worker", **settings) as edge:
        edge.fabric.model_digest = "m"
        edge.fabric.on_unit = spoken
        yield edge


async def detached(edge: LiveEdge, state: str = "held") -> None:
    """Wait until the edge has a session without a socket in this state."""

    async def is_detached() -> bool:
        registry = edge.edge.metrics.registry
        return bool(registry.get_sample_value("duplane_detached_sessions", {"state": state}))

    await until(is_detached, WITHIN_S)


def resumes(edge: LiveEdge, outcome: str) -> float:
    registry = edge.edge.metrics.registry
    return registry.get_sample_value("duplane_resumes_total", {"outcome": outcome}) or 0.0
