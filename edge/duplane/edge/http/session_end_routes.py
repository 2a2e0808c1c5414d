"""The route with which operators end one running session."""

from __future__ import annotations

import asyncio

from aiohttp import web

from duplane.edge.access import Level, Scope
from duplane.edge.http.fabric_routes import list_leases, list_tickets
from duplane.edge.http.http_route import HttpRoute
from duplane.edge.http.messages import json_answer
from duplane.edge.session_registry import SessionRegistry
from duplane.fabric.client import FabricClient


class SessionEndRoutes:
    """Ends sessions of this edge. A session of another edge can be ended only there."""

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
            raise web.HTTPNotFound(text=await self._why_unknown(session_id))
        return json_answer({"success": True})

    async def _why_unknown(self, session_id: str) -> str:
        """Return why this edge has no such session. Raises FabricError if no scheduler answers."""
        leases, tickets = await asyncio.gather(
            list_leases(self._fabric), list_tickets(self._fabric)
        )
        for lease in leases.leases:
            if lease.claims.session_id == session_id:
                worker_id = lease.claims.worker_id
                return f"the session is connected to another edge, its worker is {worker_id}"
        if any(ticket.session_id == session_id for ticket in tickets.tickets):
            return "the session waits at another edge; DELETE /api/queue/{ticket} removes it"
        return "no session has this id"
