"""The aiohttp application of the edge: adds the routes, and answers every failure in JSON."""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus

from aiohttp import web
from aiohttp.web_urldispatcher import AbstractRoute

from duplane.edge.access import Handler
from duplane.edge.http.access_control import AccessControl
from duplane.edge.http.http_route import HttpRoute
from duplane.edge.http.messages import json_answer
from duplane.edge.http.openai_answers import OPENAI_PREFIXES, refusal_body
from duplane.fabric.errors import FabricError, Reason

_KEPT_HEADERS = ("Allow", "Retry-After", "WWW-Authenticate")
_BUSY_S = "10"  # when a client may ask again after no scheduler has answered


def application(routes: Iterable[HttpRoute], control: AccessControl) -> web.Application:
    """Return an application that serves `routes` and answers every failure in JSON.

    Each request has to pass `control`. The application does not start if somebody adds a route
    without a level.
    """
    table: dict[AbstractRoute, HttpRoute] = {}

    @web.middleware
    async def check_access(request: web.Request, handler: Handler) -> web.StreamResponse:
        return await control.handle(request, handler, table)

    async def check_levels(app: web.Application) -> None:
        if unknown := [str(route) for route in app.router.routes() if route not in table]:
            raise ValueError(f"routes without a level: {', '.join(unknown)}")

    app = web.Application(middlewares=[_render_failures, check_access])
    app.on_response_prepare.append(control.add_headers)
    app.on_startup.append(check_levels)
    for route in routes:
        resource = app.router.add_resource(route.path)
        methods = ("GET", "HEAD") if route.method == "GET" else (route.method,)
        for method in methods:
            table[resource.add_route(method, route.handler)] = route
    return app


@web.middleware
async def _render_failures(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn failures into JSON answers."""
    try:
        return await handler(request)
    except web.HTTPException as refusal:
        is_websocket = request.headers.get("Upgrade", "").strip().lower() == "websocket"
        if refusal.status == HTTPStatus.NOT_FOUND and is_websocket:
            return _failure(request, refusal.status, "this path serves no WebSocket")
        answer = _failure(request, refusal.status, refusal.text or refusal.reason)
        for name in _KEPT_HEADERS:
            if value := refusal.headers.get(name):
                answer.headers[name] = value
        return answer
    except FabricError as failure:
        if failure.reason is Reason.INVALID_FIELD:
            return _failure(request, HTTPStatus.UNPROCESSABLE_ENTITY, failure.message)
        answer = _failure(request, HTTPStatus.SERVICE_UNAVAILABLE, "no scheduler answers")
        answer.headers["Retry-After"] = _BUSY_S
        return answer


def _failure(request: web.Request, status: int, message: str) -> web.Response:
    """Return the answer to a failed request; below OpenAI's paths in the form of its API, too."""
    if request.path.startswith(OPENAI_PREFIXES):
        return json_answer(refusal_body(status, message), status)
    return json_answer({"detail": message}, status)
