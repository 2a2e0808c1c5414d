"""The edge's plain HTTP answers, on the same port as the WebSockets.

Knows the paths and who may ask; what is told is rendered in `status.py` and `estimates.py`.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from http import HTTPStatus

import grpc.aio
import orjson
from aiohttp import web
from websockets.asyncio.server import ServerConnection
from websockets.http11 import Request, Response

from duplane.edge.assets import Assets
from duplane.edge.entry import Route, is_chat, route_of
from duplane.edge.estimates import eta_status, read_eta
from duplane.edge.modes import MODES
from duplane.edge.peers import identify, join_headers, parse_networks
from duplane.edge.recording.routes import recording_routes
from duplane.edge.settings import EdgeSettings
from duplane.edge.status import (
    cache_list,
    fabric_status,
    is_serving,
    queue_status,
    ticket_status,
    unknown_status,
    worker_list,
)
from duplane.fabric.client import FabricClient
from duplane.fabric.errors import Reason, from_rpc
from duplane.fabric.v1 import admin_pb2, admin_pb2_grpc

_DEADLINE_S = 1.0  # for the scheduler; what takes longer counts as down
_MAX_BODY_BYTES = 64 * 1024
_FORBIDDEN = (
    "only operators may do this: send the edge's admin token as `Authorization: Bearer`, or, where"
    " none is set, ask from the edge's own machine"
)
# The pages of the reference, by the kind of session that they need.
_APPS = {
    "chat": {"app_id": "turnbased", "name": "Turn-based Chat", "route": "/turnbased"},
    "omni_duplex": {"app_id": "omni", "name": "Omni Full-Duplex", "route": "/omni"},
    "audio_duplex": {
        "app_id": "audio_duplex",
        "name": "Audio Full-Duplex",
        "route": "/audio_duplex",
    },
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HttpAnswers:
    """Everything that is asked without a WebSocket."""

    def __init__(
        self,
        fabric: FabricClient,
        settings: EdgeSettings,
        assets: Assets,
        session_count: Callable[[], int],
    ) -> None:
        self.is_draining = False
        self._fabric = fabric
        self._settings = settings
        self._proxies = parse_networks(settings.trusted_proxies)
        self._assets = assets
        self._session_count = session_count

    def application(self) -> web.Application:
        """Return the routes."""
        app = web.Application(middlewares=[self._answer], client_max_size=_MAX_BODY_BYTES)
        app.on_response_prepare.append(_unnamed)
        app.add_routes(
            [
                _get("/health", self._health),
                _get("/ready", self._ready),
                _get("/status", self._status),
                _get("/workers", self._workers),
                _get("/cache", self._cache),
                _get("/sessions", self._sessions),
                _get("/api/queue", self._queue),
                web.get("/api/queue/{ticket}", self._ticket),
                web.delete("/api/queue/{ticket}", self._cancel_ticket),
                _get("/api/config/eta", self._eta),
                web.put("/api/config/eta", self._set_eta),
                _get("/api/apps", self._apps),
                _get("/api/frontend_defaults", self._frontend_defaults),
                _get("/api/default_ref_audio", self._default_voice),
                _get("/api/presets", self._presets),
                web.get("/api/presets/{mode}/{preset}/audio", self._preset_audio),
                _get(Route.REALTIME.value, self._upgrade_required),
                _get(Route.DUPLEX.value, self._upgrade_required),
                _get(Route.CHAT.value, self._upgrade_required),
                *recording_routes(self._settings.recording, self._require_operator),
            ]
        )
        return app

    def refuse_upgrade(self, connection: ServerConnection, request: Request) -> Response | None:
        """Return the answer to a WebSocket handshake that has come to the wrong path, else None."""
        if route_of(request.path) is not None:
            if is_chat(request.path):
                connection.protocol.max_message_size = self._settings.limits.chat_message_bytes
            return None
        body = orjson.dumps({"detail": "no WebSocket is served here"}).decode()
        response = connection.respond(HTTPStatus.NOT_FOUND, body)
        del response.headers["Content-Type"]
        response.headers["Content-Type"] = "application/json"
        return response

    # --- every request ---

    @web.middleware
    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Bound the time of an answer, and tell every failure as JSON."""
        try:
            async with asyncio.timeout(self._settings.limits.handshake_s):
                return await handler(request)
        except web.HTTPException as refusal:
            answer = _json({"detail": refusal.text or refusal.reason}, refusal.status)
            if allowed := refusal.headers.get("Allow"):
                answer.headers["Allow"] = allowed
            return answer
        except TimeoutError:
            return _json({"detail": "the request took too long"}, HTTPStatus.REQUEST_TIMEOUT)
        except grpc.aio.AioRpcError as error:
            failure = from_rpc(error)
            if failure.reason is Reason.INVALID_FIELD:
                return _json({"detail": failure.message}, HTTPStatus.UNPROCESSABLE_ENTITY)
            return _json({"detail": "no scheduler answers"}, HTTPStatus.SERVICE_UNAVAILABLE)

    def _require_operator(self, request: web.Request) -> None:
        token = self._settings.admin_token
        if token:
            told = request.headers.get("Authorization", "").encode(errors="replace")
            is_operator = hmac.compare_digest(told, f"Bearer {token}".encode())
        else:
            headers = join_headers(request.headers.items())
            is_operator = identify(request.remote or "", headers, self._proxies).is_local
        if not is_operator:
            raise web.HTTPForbidden(text=_FORBIDDEN)

    # --- the process and the fabric ---

    async def _health(self) -> web.Response:
        """Tell that the process lives."""
        return _json({"status": "healthy", "timestamp": _now().isoformat()})

    async def _ready(self) -> web.Response:
        """Tell whether a session that comes now will get a slot, be it after a wait."""
        if self.is_draining:
            return _unready("draining")
        try:
            workers = await self._list_workers()
        except grpc.aio.AioRpcError:
            return _unready("no scheduler answers")
        if not any(map(is_serving, workers.workers)):
            return _unready("no worker serves")
        return _json({"status": "ready"})

    async def _status(self) -> web.Response:
        """Tell what the scheduler knows; its absence is a status too."""
        try:
            workers, leases, tickets = await asyncio.gather(
                self._list_workers(), self._list_leases(), self._list_tickets()
            )
        except grpc.aio.AioRpcError:
            status, is_reachable = unknown_status(_now()), False
        else:
            status, is_reachable = fabric_status(workers, leases, tickets, _now()), True
        return _json(
            {
                **status,
                "is_scheduler_reachable": is_reachable,
                "is_draining": self.is_draining,
                "edge_session_count": self._session_count(),
            }
        )

    async def _workers(self) -> web.Response:
        workers, leases = await asyncio.gather(self._list_workers(), self._list_leases())
        return _json(worker_list(workers, leases, _now()))

    async def _cache(self) -> web.Response:
        workers, leases = await asyncio.gather(self._list_workers(), self._list_leases())
        return _json(cache_list(workers, leases))

    async def _sessions(self) -> web.Response:
        """Tell which chats workers keep between requests: every chat brings its whole history."""
        return _json({"total": 0, "sessions": []})

    # --- the queue ---

    async def _queue(self) -> web.Response:
        leases, tickets = await asyncio.gather(self._list_leases(), self._list_tickets())
        return _json(queue_status(leases, tickets, _now()))

    async def _ticket(self, request: web.Request) -> web.Response:
        tickets = await self._list_tickets()
        return _json(ticket_status(tickets, request.match_info["ticket"], _now()))

    async def _cancel_ticket(self, request: web.Request) -> web.Response:
        """Take a ticket out of the queue; its client is told `worker_busy` and closed."""
        self._require_operator(request)
        wanted = admin_pb2.CancelTicketRequest(ticket_id=request.match_info["ticket"])
        try:
            await self._admin.CancelTicket(wanted, timeout=_DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            if from_rpc(error).reason not in (Reason.UNKNOWN_TICKET, Reason.INVALID_FIELD):
                raise
            return _json({"success": False})
        return _json({"success": True})

    async def _eta(self) -> web.Response:
        told = await self._admin.GetEstimates(admin_pb2.GetEstimatesRequest(), timeout=_DEADLINE_S)
        return _json(eta_status(told.estimates))

    async def _set_eta(self, request: web.Request) -> web.Response:
        self._require_operator(request)
        try:
            wanted = read_eta(await request.read())
        except ValueError as error:
            raise web.HTTPUnprocessableEntity(text=str(error)) from None
        told = await self._admin.UpdateEstimates(wanted, timeout=_DEADLINE_S)
        return _json(eta_status(told.estimates))

    # --- what clients start from ---

    async def _apps(self) -> web.Response:
        served = {mode.request_type for mode in MODES.values()}
        return _json({"apps": [app for kind, app in _APPS.items() if kind in served]})

    async def _frontend_defaults(self) -> web.Response:
        return _json({"playback_delay_ms": self._settings.playback_delay_ms})

    async def _default_voice(self) -> web.Response:
        if self._assets.default_voice is None:
            raise web.HTTPNotFound(text="No default ref audio configured")
        return _json(self._assets.default_voice)

    async def _presets(self) -> web.Response:
        return _json(self._assets.presets)

    async def _preset_audio(self, request: web.Request) -> web.Response:
        mode, preset = request.match_info["mode"], request.match_info["preset"]
        audio = self._assets.preset_audio.get((mode, preset))
        if audio is None:
            raise web.HTTPNotFound(text=f"Preset not found: {mode}/{preset}")
        return _json(audio)

    async def _upgrade_required(self) -> web.Response:
        raise web.HTTPUpgradeRequired(text="this path takes WebSockets")

    # --- the scheduler ---

    @property
    def _admin(self) -> admin_pb2_grpc.AdminServiceAsyncStub:
        return self._fabric.admin

    async def _list_workers(self) -> admin_pb2.ListWorkersResponse:
        return await self._admin.ListWorkers(admin_pb2.ListWorkersRequest(), timeout=_DEADLINE_S)

    async def _list_leases(self) -> admin_pb2.ListLeasesResponse:
        return await self._admin.ListLeases(admin_pb2.ListLeasesRequest(), timeout=_DEADLINE_S)

    async def _list_tickets(self) -> admin_pb2.ListTicketsResponse:
        return await self._admin.ListTickets(admin_pb2.ListTicketsRequest(), timeout=_DEADLINE_S)


def _now() -> datetime:
    return datetime.now(UTC)


def _json(body: object, status: int = HTTPStatus.OK) -> web.Response:
    """Answer once per connection: a proxy must not send a WebSocket over a used one."""
    answer = web.Response(body=orjson.dumps(body), status=status, content_type="application/json")
    answer.force_close()
    return answer


def _unready(reason: str) -> web.Response:
    body = {"status": "not ready", "reason": reason}
    return _json(body, HTTPStatus.SERVICE_UNAVAILABLE)


def _get(path: str, answer: Callable[[], Awaitable[web.Response]]) -> web.RouteDef:
    """Route a path whose answer does not depend on the request."""

    async def handle(_: web.Request) -> web.Response:
        return await answer()

    return web.get(path, handle)


async def _unnamed(_: web.Request, response: web.StreamResponse) -> None:
    """Say nothing of what the edge is made of."""
    response.headers.popall("Server", None)
