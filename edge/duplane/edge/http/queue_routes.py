"""The routes of the queue: its tickets, and the settings of wait estimates."""

from __future__ import annotations

import asyncio

from aiohttp import web

from duplane.edge.access import Level, Scope, caller_of
from duplane.edge.http.estimates import eta_status, read_eta
from duplane.edge.http.fabric_routes import DEADLINE_S, list_leases, list_tickets, now
from duplane.edge.http.http_route import HttpRoute
from duplane.edge.http.messages import json_answer, read_body
from duplane.edge.http.status import queue_status, ticket_status
from duplane.fabric.client import FabricClient
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.tls.access import for_operator
from duplane.fabric.v1 import admin_pb2

_MAX_BODY_BYTES = 64 * 1024


class QueueRoutes:
    """Lists and cancels tickets. `body_s` limits the time to receive a request's body."""

    def __init__(self, fabric: FabricClient, body_s: float) -> None:
        self._fabric = fabric
        self._body_s = body_s

    def routes(self) -> list[HttpRoute]:
        """Return the routes."""
        one = "/api/queue/{ticket}"
        return [
            HttpRoute("GET", "/api/queue", self._queue, Level.CLIENT),
            HttpRoute("GET", one, self._ticket, Level.CLIENT),
            HttpRoute("DELETE", one, self._cancel_ticket, Level.OPERATOR, Scope.SESSIONS),
            HttpRoute("GET", "/api/config/eta", self._eta, Level.MONITOR),
            HttpRoute("PUT", "/api/config/eta", self._set_eta, Level.OPERATOR, Scope.DRAIN),
        ]

    async def _queue(self, request: web.Request) -> web.Response:
        leases, tickets = await asyncio.gather(
            list_leases(self._fabric), list_tickets(self._fabric)
        )
        has_ids = Scope.READ in caller_of(request).scopes
        return json_answer(queue_status(leases, tickets, now(), has_ids=has_ids))

    async def _ticket(self, request: web.Request) -> web.Response:
        tickets = await list_tickets(self._fabric)
        has_ids = Scope.READ in caller_of(request).scopes
        ticket_id = request.match_info["ticket"]
        return json_answer(ticket_status(tickets, ticket_id, now(), has_ids=has_ids))

    async def _cancel_ticket(self, request: web.Request) -> web.Response:
        """Cancel a ticket; its client gets the error `worker_busy` and is disconnected."""
        query = admin_pb2.CancelTicketRequest(ticket_id=request.match_info["ticket"])
        try:
            await self._fabric.administer(
                lambda admin: admin.CancelTicket(
                    query, timeout=DEADLINE_S, metadata=for_sender(request)
                )
            )
        except FabricError as failure:
            if failure.reason not in (Reason.UNKNOWN_TICKET, Reason.INVALID_FIELD):
                raise
            return json_answer({"success": False})
        return json_answer({"success": True})

    async def _eta(self, _: web.Request) -> web.Response:
        query = admin_pb2.GetEstimatesRequest()
        response = await self._fabric.administer(
            lambda admin: admin.GetEstimates(query, timeout=DEADLINE_S)
        )
        return json_answer(eta_status(response.estimates))

    async def _set_eta(self, request: web.Request) -> web.Response:
        body = await read_body(request, _MAX_BODY_BYTES, self._body_s)
        try:
            query = read_eta(body)
        except ValueError as error:
            raise web.HTTPUnprocessableEntity(text=str(error)) from None
        response = await self._fabric.administer(
            lambda admin: admin.UpdateEstimates(
                query, timeout=DEADLINE_S, metadata=for_sender(request)
            )
        )
        return json_answer(eta_status(response.estimates))


def for_sender(request: web.Request) -> tuple[tuple[str, str], ...]:
    """Return the metadata that names the operator who sent a request, for the scheduler's log."""
    return for_operator(caller_of(request).credential or "without a name")
