"""The server's side of transcripts of A and B, for clients of this project.

The client connects to `ws://ADDRESS?transcript=NAME`. Two events, which no edge sends, tell it what
the client of the transcript does next: `replay.append` to send a second of sound, `replay.close` to
close the session. What a client of this project never sends is left out, with its answers.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

import orjson
import pybase64
from support.protocols.transcripts import Transcript, all_transcripts, json_of
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

SETTINGS = ("session.update", "session.init")
APPENDS = ("input_audio_buffer.append", "input.append")
FATAL = ("service_unavailable", "queue_full", "worker_busy", "worker_connect_failed")
ORDERLY = ("stopped", "client_closed", "timeout", "context_full", "user_stop")
TRANSCRIPTS = {each.name: each for each in all_transcripts()}


@dataclass
class Outcome:
    """What a client must have seen."""

    positions: list[int] = field(default_factory=list)
    text: str = ""
    sample_count: int = 0
    unit_count: int = 0
    turn_count: int = 0
    interrupted_count: int = 0
    faults: list[str] = field(default_factory=list)
    end: str | None = None
    error: str | None = None
    code: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def server_steps(transcript: Transcript) -> list[dict[str, Any]]:
    """Return the events that a client of this project gets."""
    events: list[dict[str, Any]] = []
    is_created = False
    for step in transcript.steps:
        if step.who != "server":
            continue
        event = _filled(json_of(step.rest))
        is_created = is_created or event["type"] == "session.created"
        if event["type"] == "error" and not is_created and event["error"]["code"] not in FATAL:
            continue
        events.append(event)
    return events


def _filled(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _filled(item) for key, item in value.items()}
    return {} if value == "@any" else value


def close_code(transcript: Transcript) -> int:
    return int(transcript.steps[-1].rest)


def expected(transcript: Transcript) -> Outcome:
    """Return what the transcript says, by its own words."""
    outcome = Outcome()
    is_created = False
    for event in server_steps(transcript):
        match event["type"]:
            case "session.queued" | "session.queue_update":
                outcome.positions.append(event["position"])
            case "session.created":
                is_created = True
            case "error":
                code = event["error"]["code"]
                if code in FATAL:
                    outcome.code = code
                else:
                    outcome.faults.append(code)
            case "session.closed":
                outcome.end = event["reason"]
            case kind if kind.startswith("response."):
                _add(outcome, event)
    if outcome.end in ("error", "backend_error", "server_shutdown") or (
        outcome.end and not is_created
    ):
        outcome.error, outcome.code, outcome.end = "ServerError", outcome.end, None
    elif outcome.end is None:
        kinds = {1013: "BusyError", 1008: "RefusedError", 1003: "RefusedError"}
        outcome.error = kinds.get(close_code(transcript), "RefusedError")
    return outcome


def _add(outcome: Outcome, event: dict[str, Any]) -> None:
    outcome.text += event.get("text", "")
    outcome.sample_count += len(pybase64.b64decode(event.get("audio", ""))) // 4
    if event["type"] == "response.output.delta":
        outcome.unit_count += "chunk_index" in event
        outcome.turn_count += event["kind"] == "listen" and "response_id" in event
    else:
        outcome.unit_count += 1
        outcome.turn_count += event.get("end_of_turn", False)
    outcome.interrupted_count += event.get("interrupted", False)


def is_told_to_clients(transcript: Transcript) -> bool:
    """Return whether a client of this project can be the client of a transcript."""
    if not transcript.name.startswith(("a_", "b_")) or "mode=chat" in transcript.path:
        return False
    words = [step.who for step in transcript.steps]
    kinds = [event["type"] for event in server_steps(transcript)]
    return (
        "leaves" not in words
        and ("session.created" in kinds or kinds[-1] == "error" or kinds[-1:] == ["session.closed"])
        and not _closes_early(transcript)
    )


def _closes_early(transcript: Transcript) -> bool:
    """Return whether the client closes the session before it has begun."""
    for step in transcript.steps:
        if step.who == "server" and "session.created" in step.rest:
            return False
        if step.who == "client" and "session.close" in step.rest:
            return True
    return False


@contextlib.asynccontextmanager
async def replay_server() -> AsyncGenerator[str]:
    """Run the server; yield its URL."""
    async with serve(_replay, "127.0.0.1", 0, max_size=None) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        yield f"ws://127.0.0.1:{port}"


async def _replay(socket: ServerConnection) -> None:
    with contextlib.suppress(ConnectionClosed):
        assert socket.request
        query = parse_qs(urlsplit(socket.request.path).query)
        transcript = TRANSCRIPTS[query["transcript"][0]]
        if transcript.steps[-1].who != "ends":
            return
        await _Replay(socket, transcript).run()
        await socket.close(close_code(transcript))


class _Replay:
    def __init__(self, socket: ServerConnection, transcript: Transcript) -> None:
        self._socket = socket
        self._transcript = transcript
        self._is_created = False

    async def run(self) -> None:
        left = server_steps(self._transcript)
        closes = [
            s for s in self._transcript.steps if s.who == "client" and "session.close" in s.rest
        ]
        for step in self._transcript.steps:
            if step.who == "client" and self._is_created:
                kind = orjson.loads(step.rest).get("type")
                if kind in APPENDS:
                    await self._demand("replay.append", APPENDS)
                elif step is closes[-1] if closes else False:
                    await self._demand("replay.close", ("session.close",))
            elif step.who == "server" and left and self._is(step.rest, left[0]):
                await self._tell(left.pop(0))

    def _is(self, text: str, event: dict[str, Any]) -> bool:
        return bool(_filled(json_of(text)) == event)

    async def _tell(self, event: dict[str, Any]) -> None:
        if event["type"] == "session.created":
            await self._await(SETTINGS)
            self._is_created = True
        await self._socket.send(orjson.dumps(event), text=True)

    async def _demand(self, what: str, kinds: tuple[str, ...]) -> None:
        await self._socket.send(orjson.dumps({"type": what}), text=True)
        await self._await(kinds)

    async def _await(self, kinds: tuple[str, ...]) -> None:
        event = orjson.loads(await self._socket.recv())
        assert event["type"] in kinds, event
