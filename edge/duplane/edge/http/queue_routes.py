"""The routes of the queue: its tickets, and the settings of wait estimates."""

from __future__ import annotations

import asyncio

from aiohttp import web

from duplane.edge.http.authorization import RequireOperator
from duplane.edge.http.estimates import eta_status, read_eta
from duplane.edge.http.fabric_routes import DEADLINE_S, list_leases, list_tickets, now
from duplane.edge.http.messages import json_answer, read_body
from duplane.edge.http.status import queue_status, ticket_status
from duplane.fabric.client import FabricClient
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.v1 import admin_pb2

_MAX_BODY_BYTES = 64 * 1024


class QueueRoutes:
    """Lists and cancels tickets. `body_s` limits the time to receive a request's body."""

    def __init__(
        self, fabric: FabricClient, require_operator: RequireOperator, body_s: float
    ) -> None:
        self._fabric = fabric
        self._require_operator = require_operator
        self._body_s = body_s

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [
            web.get("/api/queue", self._queue),
            web.get("/api/queue/{ticket}", self._ticket),
            web.delete("/api/queue/{ticket}", self._cancel_ticket),
            web.get("/api/config/eta", self._eta),
            web.put("/api/config/eta", self._set_eta),
        ]

    async def _queue(self, _: web.Request) -> web.Response:
        leases, tickets = await asyncio.gather(
            list_leases(self._fabric), list_tickets(self._fabric)
        )
        return json_answer(queue_status(leases, tickets, now()))

    async def _ticket(self, request: web.Request) -> web.Response:
        tickets = await list_tickets(self._fabric)
        return json_answer(ticket_status(tickets, request.match_info["ticket"], now()))

    async def _cancel_ticket(self, request: web.Request) -> web.Response:
        """Cancel a ticket; its client gets the error `worker_busy` and is disconnected."""
        self._require_operator(request)
        query = admin_pb2.CancelTicketRequest(ticket_id=request.match_info["ticket"])
        try:
            await self._fabric.administer(
                lambda admin: admin.CancelTicket(query, timeout=DEADLINE_S)
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
        self._require_operator(request)
        body = await read_body(request, _MAX_BODY_BYTES, self._body_s)
        try:
            query = read_eta(body)
        except ValueError as error:
            raise web.HTTPUnprocessableEntity(text=str(error)) from None
        response = await self._fabric.administer(
            lambda admin: admin.UpdateEstimates(query, timeout=DEADLINE_S)
        )
        return json_answer(eta_status(response.estimates))
