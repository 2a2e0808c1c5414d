"""POST /api/chat: one turn of chat for one request, on a slot of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from http import HTTPStatus
from typing import Literal

from aiohttp import web
from websockets.exceptions import ConnectionClosedError

from duplane.edge.asked_session import AskedSession
from duplane.edge.clock import Clock
from duplane.edge.ends import End, Farewell
from duplane.edge.entry import ASKED
from duplane.edge.http.messages import json_answer, read_body
from duplane.edge.modes import CHAT_MODE
from duplane.edge.peers import join_headers
from duplane.edge.sessions import Arrival, Sessions
from duplane.edge.settings import Limits

# How ends that are no answer are told; the rest is our own failure.
_STATUSES: Mapping[End, HTTPStatus] = {
    End.MODE_REFUSED: HTTPStatus.FORBIDDEN,
    End.UNREADABLE: HTTPStatus.BAD_REQUEST,
    End.REQUEST_REFUSED: HTTPStatus.UNPROCESSABLE_ENTITY,
    End.SERVICE_UNAVAILABLE: HTTPStatus.SERVICE_UNAVAILABLE,
    End.QUEUE_FULL: HTTPStatus.SERVICE_UNAVAILABLE,
    End.WORKER_BUSY: HTTPStatus.SERVICE_UNAVAILABLE,
    End.WORKER_CONNECT_FAILED: HTTPStatus.SERVICE_UNAVAILABLE,
    End.SHUTDOWN: HTTPStatus.SERVICE_UNAVAILABLE,
}


class ChatAnswers:
    """Runs each request as a session: counted, recorded and drained as all are."""

    def __init__(self, sessions: Sessions, limits: Limits, clock: Clock) -> None:
        self._sessions = sessions
        self._limits = limits
        self._clock = clock

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [web.post(ASKED, self._chat)]

    async def _chat(self, request: web.Request) -> web.Response:
        headers = join_headers(request.headers.items())
        arrival = Arrival(request.raw_path, headers, request.remote or "")
        with self._sessions.admitted(CHAT_MODE, arrival) as refusal:
            if refusal:
                return _refused(_STATUSES[refusal.end], refusal.message)
            limits = self._limits
            body = await read_body(request, limits.chat_message_bytes, limits.init_s)
            socket = _Asked(body)
            identity = self._sessions.new_identity(arrival)
            session = AskedSession(identity, limits, self._clock.now())
            running = asyncio.ensure_future(self._sessions.run(socket, session, CHAT_MODE, arrival))
            try:
                await asyncio.shield(running)
            except asyncio.CancelledError:  # the client has gone
                socket.gone.set()
                await running
                raise
            return _told(socket.answer, session.farewell)


class _Asked:
    """A request as a connection: it says one thing, is told one, and may vanish meanwhile."""

    has_binary = False

    def __init__(self, body: bytes) -> None:
        self.answer: bytes | None = None
        self.gone = asyncio.Event()
        self._body: bytes | None = body

    async def recv(self, decode: Literal[False]) -> bytes:
        del decode
        if self._body is not None:
            body, self._body = self._body, None
            return body
        await self.gone.wait()
        raise ConnectionClosedError(None, None)

    async def send(self, message: bytes, *, text: bool) -> None:
        del text
        self.answer = message

    async def close(self, code: int, reason: str) -> None:
        """The answer says it all."""


def _told(answer: bytes | None, farewell: Farewell | None) -> web.Response:
    if answer is not None:
        return json_answer(answer)
    if farewell is None:
        return _refused(HTTPStatus.INTERNAL_SERVER_ERROR, "internal error")
    status = _STATUSES.get(farewell.end, HTTPStatus.INTERNAL_SERVER_ERROR)
    return _refused(status, farewell.reason)


def _refused(status: int, message: str) -> web.Response:
    """Tell a refusal where each generation of clients looks for it."""
    return json_answer({"detail": message, "error": message, "success": False}, status)
