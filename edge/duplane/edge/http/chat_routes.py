"""POST /api/chat: one turn of chat over HTTP, as a session that ends with the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from http import HTTPStatus

from aiohttp import web

from duplane.edge.access import Level
from duplane.edge.clock import Clock
from duplane.edge.close import GONE, Close, CloseReason
from duplane.edge.dialects.d_http import DialectDHttp, error_body
from duplane.edge.http.http_route import HttpRoute
from duplane.edge.http.messages import json_answer, read_body
from duplane.edge.modes import CHAT_MODE
from duplane.edge.routing import HTTP_CHAT_PATH
from duplane.edge.session.chat_session import ChatSession
from duplane.edge.session_registry import SessionRegistry
from duplane.edge.settings import Limits
from duplane.edge.transport.client import Receiver

# The HTTP status of a request that gets no answer, by close reason; 500 for all other reasons.
_STATUSES: Mapping[CloseReason, HTTPStatus] = {
    CloseReason.MODE_REFUSED: HTTPStatus.FORBIDDEN,
    CloseReason.CREDENTIAL_ENDED: HTTPStatus.UNAUTHORIZED,
    CloseReason.UNREADABLE: HTTPStatus.BAD_REQUEST,
    CloseReason.REQUEST_REFUSED: HTTPStatus.UNPROCESSABLE_ENTITY,
    CloseReason.SERVICE_UNAVAILABLE: HTTPStatus.SERVICE_UNAVAILABLE,
    CloseReason.MODEL_NOT_SERVED: HTTPStatus.SERVICE_UNAVAILABLE,
    CloseReason.QUEUE_FULL: HTTPStatus.SERVICE_UNAVAILABLE,
    CloseReason.QUOTA: HTTPStatus.TOO_MANY_REQUESTS,
    CloseReason.WORKER_BUSY: HTTPStatus.SERVICE_UNAVAILABLE,
    CloseReason.WORKER_CONNECT_FAILED: HTTPStatus.SERVICE_UNAVAILABLE,
    CloseReason.SHUTDOWN: HTTPStatus.SERVICE_UNAVAILABLE,
}


class ChatRoutes:
    """Runs each request as a session, which is counted, recorded and drained like any other."""

    def __init__(self, sessions: SessionRegistry, limits: Limits, clock: Clock) -> None:
        self._sessions = sessions
        self._limits = limits
        self._clock = clock

    def routes(self) -> list[HttpRoute]:
        """Return the routes."""
        return [HttpRoute("POST", HTTP_CHAT_PATH, self._chat, Level.CLIENT)]

    async def _chat(self, request: web.Request) -> web.Response:
        chat_request = self._sessions.parse(request)
        with self._sessions.admitted(CHAT_MODE, chat_request) as refusal:
            if refusal:
                return _refused(refusal)
            limits = self._limits
            body = await read_body(request, limits.chat_message_bytes, limits.init_s)
            now = self._clock.now()
            identity = self._sessions.new_identity(chat_request)
            dialect = DialectDHttp(identity, limits, CHAT_MODE, now)
            session = ChatSession(dialect, limits, now)
            client = HttpChatClient(body)
            del body  # the client lets go of it before the answer
            running = asyncio.ensure_future(
                self._sessions.run(client, session, CHAT_MODE, chat_request)
            )
            try:
                await asyncio.shield(running)
            except asyncio.CancelledError:  # the connection is lost
                client.is_gone.set()
                await running
                raise
            return _response(client.answer, session.closed)


class HttpChatClient:
    """The client of a session for one HTTP request: it sends one message and gets one answer."""

    def __init__(self, body: bytes) -> None:
        self.answer: bytes | None = None
        self.is_gone = asyncio.Event()
        self._body = body

    async def serve(self, receiver: Receiver) -> None:
        """Pass the body to the session, then wait until the connection is lost."""
        body, self._body = self._body, b""  # large, and of no use while the answer is made
        await receiver.receive(body)
        del body
        await self.is_gone.wait()
        receiver.end(GONE)

    def send(self, events: list[bytes], on_written: Callable[[], None] | None = None) -> None:
        """Store the last event, which is the answer."""
        for event in events:
            self.answer = event
        if on_written:
            on_written()

    async def close(self, close: Close, code: int) -> None:
        """Do nothing: the handler sends the response after the session has ended."""


def _response(answer: bytes | None, closed: Close | None) -> web.Response:
    if answer is not None:
        return json_answer(answer)
    return _refused(closed or Close(CloseReason.FAILED, "internal error"))


def _refused(close: Close) -> web.Response:
    status = _STATUSES.get(close.reason, HTTPStatus.INTERNAL_SERVER_ERROR)
    answer = json_answer(error_body(close.text), status)
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        answer.headers["Retry-After"] = close.retry_after
    return answer
