"""The routes for the health and status of this process and of its fabric."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from http import HTTPStatus
from typing import TypeVar

from aiohttp import web

from duplane.edge.access import Level, Scope, caller_of, find_caller
from duplane.edge.http.http_route import HttpRoute
from duplane.edge.http.messages import json_answer
from duplane.edge.http.status import (
    cache_list,
    fabric_status,
    unknown_status,
    unready_reason,
    worker_health,
    worker_list,
)
from duplane.fabric.client import FabricClient
from duplane.fabric.errors import FabricError
from duplane.fabric.v1 import admin_pb2

HEALTH_DEADLINE_S = 0.3  # for all calls together, because /health must always answer soon
DEADLINE_S = 1.0  # for one call to a scheduler; a slower scheduler counts as down
_DRAINING = "draining"
_NO_SCHEDULER = "no scheduler answers"
MAX_PAGES = 200  # of one list: up to 200,000 workers, leases or tickets

_Page = TypeVar(
    "_Page",
    admin_pb2.ListWorkersResponse,
    admin_pb2.ListLeasesResponse,
    admin_pb2.ListTicketsResponse,
)


class FabricRoutes:
    """Serves the scheduler's lists. The other parameters describe the sessions of this edge."""

    def __init__(
        self,
        fabric: FabricClient,
        is_draining: Callable[[], bool],
        session_count: Callable[[], int],
        unmovable_count: Callable[[], int],
        approximate_count: Callable[[], int],
    ) -> None:
        self._fabric = fabric
        self._is_draining = is_draining
        self._session_count = session_count
        self._unmovable_count = unmovable_count
        self._approximate_count = approximate_count

    def routes(self) -> list[HttpRoute]:
        """Return the routes."""
        return [
            HttpRoute("GET", "/health", self._health, Level.PUBLIC),
            HttpRoute("GET", "/ready", self._ready, Level.PUBLIC),
            HttpRoute("GET", "/status", self._status, Level.CLIENT),
            HttpRoute("GET", "/workers", self._workers, Level.MONITOR),
            HttpRoute("GET", "/cache", self._cache, Level.MONITOR),
            HttpRoute("GET", "/sessions", self._sessions, Level.CLIENT),
        ]

    async def _health(self, request: web.Request) -> web.Response:
        """Answer that the process is alive.

        For clients the answer includes the worker status in the words of the reference. Others
        cause no call to a scheduler.
        """
        alive = {"status": "healthy", "timestamp": now().isoformat()}
        if find_caller(request) is None:
            return json_answer(alive)
        try:
            async with asyncio.timeout(HEALTH_DEADLINE_S):
                workers, leases = await asyncio.gather(
                    list_workers(self._fabric), list_leases(self._fabric)
                )
        except (FabricError, TimeoutError):
            return json_answer({**alive, **worker_health((), ())})
        return json_answer({**alive, **worker_health(workers.workers, leases.leases)})

    async def _ready(self, _: web.Request) -> web.Response:
        """Answer whether a new session would get a slot, now or after a wait."""
        if self._is_draining():
            return _unready(_DRAINING)
        try:
            workers = await list_workers(self._fabric)
        except FabricError:
            return _unready(_NO_SCHEDULER)
        if reason := unready_reason(workers):
            return _unready(reason)
        return json_answer({"status": "ready"})

    async def _status(self, request: web.Request) -> web.Response:
        """Answer with the counts of the scheduler, or say that no scheduler answers."""
        has_ids = Scope.READ in caller_of(request).scopes
        try:
            workers, leases, tickets = await asyncio.gather(
                list_workers(self._fabric), list_leases(self._fabric), list_tickets(self._fabric)
            )
        except FabricError:
            status = unknown_status(now())
            is_reachable = False
            reason = _NO_SCHEDULER
        else:
            status = fabric_status(workers, leases, tickets, now(), has_ids=has_ids)
            is_reachable = True
            reason = unready_reason(workers)
        return json_answer(
            {
                **status,
                "unready_reason": _DRAINING if self._is_draining() else reason,
                "is_scheduler_reachable": is_reachable,
                "is_draining": self._is_draining(),
                "edge_session_count": self._session_count(),
                "edge_unmovable_session_count": self._unmovable_count(),
                "edge_approximate_session_count": self._approximate_count(),
            }
        )

    async def _workers(self, _: web.Request) -> web.Response:
        workers, leases = await asyncio.gather(
            list_workers(self._fabric), list_leases(self._fabric)
        )
        return json_answer(worker_list(workers, leases, now()))

    async def _cache(self, _: web.Request) -> web.Response:
        workers, leases = await asyncio.gather(
            list_workers(self._fabric), list_leases(self._fabric)
        )
        return json_answer(cache_list(workers, leases))

    async def _sessions(self, _: web.Request) -> web.Response:
        """Answer an empty list: each chat request has its whole history, so no chat is stored."""
        return json_answer({"total": 0, "sessions": []})


def now() -> datetime:
    """Return the wall time."""
    return datetime.now(UTC)


def _unready(reason: str) -> web.Response:
    body = {"status": "not ready", "reason": reason}
    return json_answer(body, HTTPStatus.SERVICE_UNAVAILABLE)


async def list_workers(fabric: FabricClient) -> admin_pb2.ListWorkersResponse:
    """Return the workers that a scheduler lists. Raises FabricError."""

    async def page(token: str) -> admin_pb2.ListWorkersResponse:
        query = admin_pb2.ListWorkersRequest(page_token=token)
        return await fabric.administer(lambda admin: admin.ListWorkers(query, timeout=DEADLINE_S))

    return await _all_pages(page)


async def list_leases(fabric: FabricClient) -> admin_pb2.ListLeasesResponse:
    """Return the leases that a scheduler lists. Raises FabricError."""

    async def page(token: str) -> admin_pb2.ListLeasesResponse:
        query = admin_pb2.ListLeasesRequest(page_token=token)
        return await fabric.administer(lambda admin: admin.ListLeases(query, timeout=DEADLINE_S))

    return await _all_pages(page)


async def list_tickets(fabric: FabricClient) -> admin_pb2.ListTicketsResponse:
    """Return the tickets that a scheduler lists. Raises FabricError."""

    async def page(token: str) -> admin_pb2.ListTicketsResponse:
        query = admin_pb2.ListTicketsRequest(page_token=token)
        return await fabric.administer(lambda admin: admin.ListTickets(query, timeout=DEADLINE_S))

    return await _all_pages(page)


async def _all_pages(page: Callable[[str], Awaitable[_Page]]) -> _Page:
    """Read one page after another, at most `MAX_PAGES`, and join them. The rest is left out."""
    whole = part = await page("")
    for _ in range(MAX_PAGES - 1):
        if not part.next_page_token:
            break
        part = await page(part.next_page_token)
        whole.MergeFrom(part)
    whole.next_page_token = part.next_page_token
    return whole
