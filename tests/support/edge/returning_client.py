"""A client of dialect A, B or C that loses its socket and returns, at a live edge."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import orjson
from support.edge.live_edge import AUDIO, LiveEdge, receive
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

    async def until_error(self) -> str:
        """Read until an error, and return its code and message."""
        while (event := await self.read())["type"] != "error":
            pass
        error = event["error"]
        return error if isinstance(error, str) else f"{error['code']}: {error['message']}"

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
        turns = list(dict.fromkeys(event.get("response_id") for event in self.heard))
        return [
            {key: value for key, value in event.items() if key not in changing}
            | {"turn": turns.index(event.get("response_id"))}
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
