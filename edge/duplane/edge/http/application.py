"""The aiohttp application of the edge: adds the routes, and answers every failure in JSON."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from http import HTTPStatus

from aiohttp import web

from duplane.edge.http.messages import json_answer
from duplane.fabric.errors import FabricError, Reason

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def application(routes: Iterable[web.RouteDef]) -> web.Application:
    """Return an application that serves `routes` and answers every failure in JSON."""
    app = web.Application(middlewares=[_render_failures])
    app.on_response_prepare.append(_remove_server_header)
    app.add_routes(routes)
    return app


@web.middleware
async def _render_failures(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn failures into JSON answers."""
    try:
        return await handler(request)
    except web.HTTPException as refusal:
        is_websocket = request.headers.get("Upgrade", "").strip().lower() == "websocket"
        if refusal.status == HTTPStatus.NOT_FOUND and is_websocket:
            return json_answer({"detail": "this path serves no WebSocket"}, refusal.status)
        answer = json_answer({"detail": refusal.text or refusal.reason}, refusal.status)
        if allowed := refusal.headers.get("Allow"):
            answer.headers["Allow"] = allowed
        return answer
    except FabricError as failure:
        if failure.reason is Reason.INVALID_FIELD:
            return json_answer({"detail": failure.message}, HTTPStatus.UNPROCESSABLE_ENTITY)
        return json_answer({"detail": "no scheduler answers"}, HTTPStatus.SERVICE_UNAVAILABLE)


async def _remove_server_header(_: web.Request, response: web.StreamResponse) -> None:
    """Remove the header that names the server software."""
    response.headers.popall("Server", None)
