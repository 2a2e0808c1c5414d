"""The route with which operators end one running session."""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import web

from duplane.edge.access import Level, Scope
from duplane.edge.http.fabric_routes import DEADLINE_S
from duplane.edge.http.http_route import HttpRoute
from duplane.edge.http.messages import json_answer
from duplane.edge.http.queue_routes import for_sender
from duplane.edge.session_registry import SessionRegistry
from duplane.fabric.client import FabricClient
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.v1 import admin_pb2


class SessionEndRoutes:
    """Ends any session of the fabric: one of this edge here, any other at the scheduler."""

    def __init__(self, fabric: FabricClient, sessions: SessionRegistry) -> None:
        self._fabric = fabric
        self._sessions = sessions

    def routes(self) -> list[HttpRoute]:
        """Return the routes."""
        path = "/api/sessions/{session}"
        return [HttpRoute("DELETE", path, self._end, Level.OPERATOR, Scope.SESSIONS)]

    async def _end(self, request: web.Request) -> web.Response:
        """End a session; its client gets the event for a shutdown. A recording of it stays."""
        session_id = request.match_info["session"]
        if not self._sessions.end(session_id):
            await self._end_elsewhere(session_id, for_sender(request))
        return json_answer({"success": True})

    async def _end_elsewhere(self, session_id: str, metadata: Sequence[tuple[str, str]]) -> None:
        """End a session of another edge. Raises FabricError if no scheduler answers.

        `metadata` names the operator.
        """
        end = admin_pb2.EndSessionRequest(session_id=session_id)
        try:
            await self._fabric.administer(
                lambda admin: admin.EndSession(end, timeout=DEADLINE_S, metadata=metadata)
            )
        except FabricError as error:
            if error.reason in (Reason.UNKNOWN_SESSION, Reason.INVALID_FIELD):
                raise web.HTTPNotFound(text="no session has this id") from None
            raise
