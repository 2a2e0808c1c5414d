"""The WebSocket routes: each connection runs one session, or is closed with a refusal."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Coroutine

from aiohttp import hdrs, web

from duplane.edge.access import Level
from duplane.edge.clock import Clock
from duplane.edge.close import CLOSE_CODES, Close, CloseReason
from duplane.edge.http.http_route import HttpRoute
from duplane.edge.identity import Identity
from duplane.edge.modes import DEFAULT_MODE, MODES
from duplane.edge.remote_returns import RemoteReturns
from duplane.edge.resumes import first_message
from duplane.edge.routing import (
    ENDPOINTS,
    OPENAI_ROUTES,
    REALTIME_ROUTES,
    REFUSAL_DIALECTS,
    Route,
    find_route,
    max_message_bytes,
    refused_query,
    unsupported_mode,
)
from duplane.edge.session.duplex_session import DuplexSession
from duplane.edge.session_registry import ClientRequest, SessionRegistry
from duplane.edge.settings import Limits
from duplane.edge.transport.websocket import OPENAI_SUBPROTOCOLS, SUBPROTOCOLS, WebSocket

_log = logging.getLogger(__name__)
# A client whose address holds all its sessions cannot know when one of them ends.
_RETRY_AFTER_S = "10"


class SessionRoutes:
    """Accepts WebSockets and starts the session that the URL requests."""

    def __init__(
        self, sessions: SessionRegistry, returns: RemoteReturns, limits: Limits, clock: Clock
    ) -> None:
        self._sessions = sessions
        self._returns = returns
        self._limits = limits
        self._clock = clock

    def routes(self) -> list[HttpRoute]:
        """Return the routes."""
        return [HttpRoute("GET", route.value, self._serve, Level.CLIENT) for route in Route]

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        """Serve one WebSocket until it is closed."""
        if find_route(request.raw_path) is None:
            raise web.HTTPNotFound
        # RFC 6455 demands GET; aiohttp would open a WebSocket also for HEAD.
        is_upgrade = request.headers.get("Upgrade", "").strip().lower() == "websocket"
        if request.method != hdrs.METH_GET or not is_upgrade:
            raise web.HTTPUpgradeRequired(text="this path accepts only WebSockets")
        limits, client_request = self._limits, self._sessions.parse(request)
        target = client_request.target
        if target.route in REALTIME_ROUTES and (fault := refused_query(client_request.path)):
            raise web.HTTPBadRequest(text=fault)
        max_bytes = max_message_bytes(target, limits)
        is_openai = target.route in OPENAI_ROUTES
        if is_openai and (refusal := self._known_refusal(client_request)):
            raise web.HTTPServiceUnavailable(
                text=refusal.message, headers={hdrs.RETRY_AFTER: _RETRY_AFTER_S}
            )
        subprotocols = OPENAI_SUBPROTOCOLS if is_openai else SUBPROTOCOLS
        socket = WebSocket(request, limits, max_bytes, subprotocols)
        async with socket.opened() as response:
            await _finish(self._run(socket, client_request))
        return response

    def _known_refusal(self, request: ClientRequest) -> Close | None:
        """Return why the edge cannot serve a session now, if it knows this without a scheduler.

        Clients of OpenAI's protocols expect this as the status of the upgrade. For other clients,
        which are mostly browsers, see `_refuse`.
        """
        endpoint = ENDPOINTS.get((request.target.route, request.target.mode))
        if endpoint is None:
            return None
        with self._sessions.admitted(endpoint.mode, request) as refusal:
            is_temporary = refusal and refusal.reason is CloseReason.SERVICE_UNAVAILABLE
            return refusal if is_temporary else None

    async def _run(self, socket: WebSocket, request: ClientRequest) -> None:
        """Run the session of one WebSocket.

        An unexpected error is logged and closes the WebSocket.
        """
        identity = self._sessions.new_identity(request)
        try:
            await self._admit(socket, request, identity)
        except Exception:  # noqa: BLE001 - the root of a task
            _log.exception("session %s failed", identity.session_id)
            failed = Close(CloseReason.FAILED, "internal error")
            await socket.close(failed, CLOSE_CODES[failed.reason])

    async def _admit(self, socket: WebSocket, request: ClientRequest, identity: Identity) -> None:
        target = request.target
        endpoint = ENDPOINTS.get((target.route, target.mode))
        if endpoint is None:
            await self._refuse(socket, identity, target.route, unsupported_mode(target.mode))
            return
        session = endpoint.new_session(
            identity,
            self._limits,
            self._clock.now(),
            self._sessions.continuity,
            self._sessions.scorers,
        )
        if isinstance(session, DuplexSession):
            may_have = self._sessions.resumes.may_have
            session.may_be_return = functools.partial(may_have, request.caller)
        with self._sessions.admitted(endpoint.mode, request) as refusal:
            if refusal is None:
                await self._sessions.run(socket, session, endpoint.mode, request)
        if refusal and isinstance(session, DuplexSession) and session.may_be_return():
            session.receive(await first_message(socket), self._clock.now())
        if isinstance(session, DuplexSession) and session.returned:
            await self._returns.run(socket, session, request)
        elif refusal:
            await self._refuse(socket, identity, target.route, refusal)

    async def _refuse(
        self, socket: WebSocket, identity: Identity, route: Route, close: Close
    ) -> None:
        """Accept the WebSocket, then close it: browsers do not show why an upgrade was refused."""
        dialect = REFUSAL_DIALECTS[route](identity, self._limits, MODES[DEFAULT_MODE])
        socket.send(dialect.ended(close, self._clock.now()))
        await socket.close(close, dialect.close_code(close))


async def _finish(session: Coroutine[None, None, None]) -> None:
    """Wait for the end of a session, so that it releases its slot even if the connection is lost.

    aiohttp cancels the handler when a connection is lost.
    """
    running = asyncio.ensure_future(session)
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        raise
