"""The edge's plain HTTP answers, on the same port as the WebSockets: every path, every refusal."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from http import HTTPStatus

import orjson
from aiohttp import web
from websockets.asyncio.server import ServerConnection
from websockets.http11 import Request, Response

from duplane.edge.entry import Route, is_chat, route_of
from duplane.edge.http.messages import json_answer
from duplane.fabric.errors import FabricError, Reason

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def application(routes: Iterable[web.RouteDef]) -> web.Application:
    """Return what answers at `routes`, and tells everything else in JSON too."""
    app = web.Application(middlewares=[_answer])
    app.on_response_prepare.append(_unnamed)
    app.add_routes([*routes, *(web.get(route.value, _upgrade_required) for route in Route)])
    return app


def refuse_upgrade(
    connection: ServerConnection, request: Request, chat_message_bytes: int
) -> Response | None:
    """Return the answer to a WebSocket handshake that has come to the wrong path, else None.

    Where chats are, messages may be longer than elsewhere.
    """
    if route_of(request.path) is not None:
        if is_chat(request.path):
            connection.protocol.max_message_size = chat_message_bytes
        return None
    body = orjson.dumps({"detail": "no WebSocket is served here"}).decode()
    response = connection.respond(HTTPStatus.NOT_FOUND, body)
    del response.headers["Content-Type"]
    response.headers["Content-Type"] = "application/json"
    return response


@web.middleware
async def _answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Tell every failure as JSON."""
    try:
        return await handler(request)
    except web.HTTPException as refusal:
        answer = json_answer({"detail": refusal.text or refusal.reason}, refusal.status)
        if allowed := refusal.headers.get("Allow"):
            answer.headers["Allow"] = allowed
        return answer
    except FabricError as failure:
        if failure.reason is Reason.INVALID_FIELD:
            return json_answer({"detail": failure.message}, HTTPStatus.UNPROCESSABLE_ENTITY)
        return json_answer({"detail": "no scheduler answers"}, HTTPStatus.SERVICE_UNAVAILABLE)


async def _upgrade_required(_: web.Request) -> web.Response:
    raise web.HTTPUpgradeRequired(text="this path takes WebSockets")


async def _unnamed(_: web.Request, response: web.StreamResponse) -> None:
    """Say nothing of what the edge is made of."""
    response.headers.popall("Server", None)
