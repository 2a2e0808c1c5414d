"""Servers of a few lines for the clients of this project. A test decides what they say."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from http import HTTPStatus
from typing import Any

import orjson
from support.time_limits import WITHIN_S
from websockets.asyncio.server import ServerConnection, serve
from websockets.http11 import Request, Response

Serve = Callable[[ServerConnection], Awaitable[None]]
LISTEN = {"type": "response.output.delta", "kind": "listen"}
SPEECH = {"type": "response.output.delta", "kind": "text", "response_id": "r"}


class Server:
    """Gives each connection to `on_connection`, after the statuses in `refusals`."""

    def __init__(self, on_connection: Serve) -> None:
        self.refusals: list[tuple[int, str]] = []
        self.keys: list[str | None] = []
        self.paths: list[str] = []
        self.on_connection = on_connection
        self.url = ""
        self.has_refused = asyncio.Event()

    def process(self, socket: ServerConnection, request: Request) -> Response | None:
        self.keys.append(request.headers.get("Authorization"))
        self.paths.append(request.path)
        if not self.refusals:
            return None
        self.has_refused.set()
        status, retry_after = self.refusals.pop(0)
        answer = socket.respond(HTTPStatus(status), "")
        answer.headers["Retry-After"] = retry_after
        return answer


@contextlib.asynccontextmanager
async def served(on_connection: Serve) -> AsyncGenerator[Server]:
    server = Server(on_connection)
    async with (
        asyncio.timeout(WITHIN_S),
        serve(on_connection, "127.0.0.1", 0, process_request=server.process) as listening,
    ):
        server.url = f"ws://127.0.0.1:{next(iter(listening.sockets)).getsockname()[1]}"
        yield server


async def tell(socket: ServerConnection, **event: object) -> None:
    await socket.send(orjson.dumps(event), text=True)


async def told(socket: ServerConnection) -> dict[str, Any]:
    return orjson.loads(await socket.recv())


async def begin(socket: ServerConnection) -> dict[str, Any]:
    """Let a client in; return its settings."""
    await tell(socket, type="session.queue_done")
    settings = await told(socket)
    await tell(socket, type="session.created", session_id="s")
    return settings


async def end(socket: ServerConnection) -> None:
    while (await told(socket))["type"] != "session.close":
        pass
    await tell(socket, type="session.closed", reason="user_stop")
    await socket.close(1000)


async def talk(socket: ServerConnection) -> None:
    await begin(socket)
    await end(socket)
