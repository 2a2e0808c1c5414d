"""The edge reads lists of a scheduler page by page."""

from __future__ import annotations

from typing import Any, cast

import pytest

from duplane.edge.http import fabric_routes
from duplane.edge.http.fabric_routes import list_leases, list_tickets, list_workers
from duplane.fabric.client import FabricClient
from duplane.fabric.v1 import admin_pb2, lease_pb2, registry_pb2

PAGE_COUNT = 3


class PagedFabric:
    """A fabric whose lists have one item on each page. A page's token is the page's number."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def administer(self, call: Any) -> Any:
        return await call(self)

    def _number(self, token: str) -> tuple[int, str]:
        self.asked.append(token)
        number = int(token or 0)
        return number, str(number + 1) if number + 1 < PAGE_COUNT else ""

    async def ListWorkers(self, query: Any, timeout: float) -> admin_pb2.ListWorkersResponse:
        number, following = self._number(query.page_token)
        worker = admin_pb2.WorkerStatus(worker=registry_pb2.Register(worker_id=f"w{number}"))
        return admin_pb2.ListWorkersResponse(workers=[worker], next_page_token=following)

    async def ListLeases(self, query: Any, timeout: float) -> admin_pb2.ListLeasesResponse:
        number, following = self._number(query.page_token)
        lease = admin_pb2.LeaseStatus(claims=lease_pb2.LeaseClaims(lease_id=f"l{number}"))
        return admin_pb2.ListLeasesResponse(leases=[lease], next_page_token=following)

    async def ListTickets(self, query: Any, timeout: float) -> admin_pb2.ListTicketsResponse:
        number, following = self._number(query.page_token)
        ticket = admin_pb2.TicketStatus(ticket_id=f"t{number}")
        return admin_pb2.ListTicketsResponse(
            tickets=[ticket], ticket_limit=9, next_page_token=following
        )


async def test_all_pages_of_each_list_are_joined() -> None:
    fabric = cast(FabricClient, PagedFabric())
    workers = await list_workers(fabric)
    assert [one.worker.worker_id for one in workers.workers] == ["w0", "w1", "w2"]
    leases = await list_leases(fabric)
    assert [one.claims.lease_id for one in leases.leases] == ["l0", "l1", "l2"]
    tickets = await list_tickets(fabric)
    assert [one.ticket_id for one in tickets.tickets] == ["t0", "t1", "t2"]
    assert tickets.ticket_limit == 9
    assert not tickets.next_page_token


async def test_number_of_pages_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fabric_routes, "MAX_PAGES", 2)
    fabric = PagedFabric()
    tickets = await list_tickets(cast(FabricClient, fabric))
    assert [one.ticket_id for one in tickets.tickets] == ["t0", "t1"]
    assert tickets.next_page_token == "2"
    assert fabric.asked == ["", "1"]
