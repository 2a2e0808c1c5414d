"""POST /v1/chat/completions: one turn of chat over HTTP, in the form of OpenAI's API."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from http import HTTPStatus

from aiohttp import web

from duplane.edge.access import Level
from duplane.edge.client_errors import ErrorCode
from duplane.edge.clock import Clock
from duplane.edge.close import Close, CloseReason
from duplane.edge.dialects.o import DialectO, refusal
from duplane.edge.http.completion_client import CompletionClient
from duplane.edge.http.http_route import HttpRoute
from duplane.edge.http.messages import json_answer, read_body
from duplane.edge.http.openai_answers import refusal_body
from duplane.edge.modes import CHAT_MODE
from duplane.edge.routing import COMPLETIONS_PATH
from duplane.edge.session.chat_session import ChatSession
from duplane.edge.session_registry import SessionRegistry
from duplane.edge.settings import Limits

# The HTTP status of a request that gets no answer, by close reason; 500 for all other reasons.
_STATUSES: Mapping[CloseReason, HTTPStatus] = {
    CloseReason.MODE_REFUSED: HTTPStatus.FORBIDDEN,
    CloseReason.CREDENTIAL_ENDED: HTTPStatus.UNAUTHORIZED,
    CloseReason.UNREADABLE: HTTPStatus.BAD_REQUEST,
    CloseReason.REQUEST_REFUSED: HTTPStatus.BAD_REQUEST,
    CloseReason.MODEL_NOT_SERVED: HTTPStatus.NOT_FOUND,
    CloseReason.SERVICE_UNAVAILABLE: HTTPStatus.SERVICE_UNAVAILABLE,
    CloseReason.QUEUE_FULL: HTTPStatus.SERVICE_UNAVAILABLE,
    CloseReason.QUOTA: HTTPStatus.TOO_MANY_REQUESTS,
    CloseReason.WORKER_BUSY: HTTPStatus.SERVICE_UNAVAILABLE,
    CloseReason.WORKER_CONNECT_FAILED: HTTPStatus.SERVICE_UNAVAILABLE,
    CloseReason.SHUTDOWN: HTTPStatus.SERVICE_UNAVAILABLE,
}
_CODES: Mapping[CloseReason, str] = {
    CloseReason.UNREADABLE: "invalid_json",
    CloseReason.MODEL_NOT_SERVED: "model_not_found",
    CloseReason.QUOTA: "insufficient_quota",
    CloseReason.SHUTDOWN: "server_shutdown",
}
_PARAMS = {CloseReason.MODEL_NOT_SERVED: "model"}
_RETRIED = (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS)


class CompletionRoutes:
    """Runs each request as a session, which is counted, recorded and drained like any other."""

    def __init__(self, sessions: SessionRegistry, limits: Limits, clock: Clock) -> None:
        self._sessions = sessions
        self._limits = limits
        self._clock = clock

    def routes(self) -> list[HttpRoute]:
        """Return the routes."""
        return [HttpRoute("POST", COMPLETIONS_PATH, self._complete, Level.CLIENT)]

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        chat_request = self._sessions.parse(request)
        with self._sessions.admitted(CHAT_MODE, chat_request) as refused:
            if refused:
                return _refused(refused)
            limits = self._limits
            body = await read_body(request, limits.chat_message_bytes, limits.init_s)
            identity = self._sessions.new_identity(chat_request)
            dialect = DialectO(identity, limits, CHAT_MODE)
            session = ChatSession(dialect, limits, self._clock.now())
            client = CompletionClient(request, body, dialect, limits)
            del body  # the client lets go of it before the answer
            running = asyncio.ensure_future(
                self._sessions.run(client, session, CHAT_MODE, chat_request)
            )
            try:
                await asyncio.shield(running)
            except asyncio.CancelledError:  # the connection is lost
                client.leave()
                await running
                raise
        if client.stream:
            return client.stream
        if client.answer is not None:
            return json_answer(client.answer)
        return _refused(session.closed or Close(CloseReason.FAILED, "internal error"))


def _refused(close: Close) -> web.Response:
    status = _STATUSES.get(close.reason, HTTPStatus.INTERNAL_SERVER_ERROR)
    if close.code is not None and close.code is not ErrorCode.INFERENCE_ERROR:
        body = {"error": refusal(close.code, close.text), "detail": close.text}
    else:
        code, param = _CODES.get(close.reason, ""), _PARAMS.get(close.reason)
        body = refusal_body(status, close.text, code=code, param=param)
    answer = json_answer(body, status)
    if status in _RETRIED:
        answer.headers["Retry-After"] = close.retry_after
    return answer
