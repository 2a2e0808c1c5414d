"""The edge's plain HTTP answers, on the same port as the WebSockets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus

import grpc.aio
import orjson
from websockets.asyncio.server import ServerConnection
from websockets.http11 import Request, Response

from duplane.edge.entry import is_chat, route_of
from duplane.edge.settings import Limits
from duplane.edge.status import fabric_status, is_serving, unknown_status
from duplane.fabric.client import FabricClient
from duplane.fabric.v1 import admin_pb2

_DEADLINE_S = 1.0  # for the scheduler; what takes longer counts as down

Answer = tuple[HTTPStatus, Mapping[str, object]]
_NOT_FOUND: Answer = (HTTPStatus.NOT_FOUND, {"error": "not found"})
_NOT_ALLOWED: Answer = (HTTPStatus.METHOD_NOT_ALLOWED, {"error": "only GET is served"})


class HttpAnswers:
    """Answers GET /health, /ready and /status; lets WebSocket requests through."""

    def __init__(
        self, fabric: FabricClient, session_count: Callable[[], int], limits: Limits
    ) -> None:
        self.is_draining = False
        self._fabric = fabric
        self._session_count = session_count
        self._chat_message_bytes = limits.chat_message_bytes
        self._routes: dict[str, Callable[[], Awaitable[Answer]]] = {
            "/health": self._health,
            "/ready": self._ready,
            "/status": self._status,
        }

    async def process_request(
        self, connection: ServerConnection, request: Request
    ) -> Response | None:
        """Return the response, or None for a request that wants to become a WebSocket."""
        path = request.path.partition("?")[0]
        is_socket = route_of(path) is not None
        if path not in self._routes and not is_socket:
            return _response(connection, _NOT_FOUND)
        if request.method != "GET":
            response = _response(connection, _NOT_ALLOWED)
            response.headers["Allow"] = "GET"
            return response
        if is_socket:
            if is_chat(request.path):
                connection.protocol.max_message_size = self._chat_message_bytes
            return None
        return _response(connection, await self._routes[path]())

    async def _health(self) -> Answer:
        """Tell that the process lives."""
        return HTTPStatus.OK, {"status": "healthy", "timestamp": time.time_ns() / 1e9}

    async def _ready(self) -> Answer:
        """Tell whether a session that comes now will get a slot, be it after a wait."""
        if self.is_draining:
            return _unready("draining")
        try:
            workers = await self._fabric.admin.ListWorkers(
                admin_pb2.ListWorkersRequest(), timeout=_DEADLINE_S
            )
        except grpc.aio.AioRpcError:
            return _unready("no scheduler answers")
        if not any(map(is_serving, workers.workers)):
            return _unready("no worker serves")
        return HTTPStatus.OK, {"status": "ready"}

    async def _status(self) -> Answer:
        """Tell what the scheduler knows; its absence is a status too."""
        admin = self._fabric.admin
        try:
            workers, leases, tickets = await asyncio.gather(
                admin.ListWorkers(admin_pb2.ListWorkersRequest(), timeout=_DEADLINE_S),
                admin.ListLeases(admin_pb2.ListLeasesRequest(), timeout=_DEADLINE_S),
                admin.ListTickets(admin_pb2.ListTicketsRequest(), timeout=_DEADLINE_S),
            )
        except grpc.aio.AioRpcError:
            status, is_reachable = unknown_status(), False
        else:
            status, is_reachable = fabric_status(workers, leases, tickets), True
        return HTTPStatus.OK, {
            **status,
            "is_scheduler_reachable": is_reachable,
            "is_draining": self.is_draining,
            "edge_session_count": self._session_count(),
        }


def _unready(reason: str) -> Answer:
    return HTTPStatus.SERVICE_UNAVAILABLE, {"status": "not ready", "reason": reason}


def _response(connection: ServerConnection, answer: Answer) -> Response:
    status, body = answer
    response = connection.respond(status, orjson.dumps(body).decode())
    del response.headers["Content-Type"]
    response.headers["Content-Type"] = "application/json"
    return response
