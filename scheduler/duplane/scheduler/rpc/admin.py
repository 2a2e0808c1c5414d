"""AdminService: the gRPC calls with which operators inspect and control a fabric."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import grpc.aio

from duplane.fabric.durations import to_seconds
from duplane.fabric.errors import FabricError, Reason, abort
from duplane.fabric.v1 import admin_pb2, admin_pb2_grpc
from duplane.scheduler.messages import estimates, lease_status
from duplane.scheduler.rpc.pages import PAGE_LENGTH, Pages, Status
from duplane.scheduler.state import SchedulerState
from duplane.scheduler.store.base import DrainRequest, Grant, LeaseStore
from duplane.scheduler.validation import (
    check_end,
    check_estimates,
    check_page,
    check_session,
    parse_ticket_id,
)
from duplane.scheduler.watch import Watch

_Context = grpc.aio.ServicerContext[Any, Any]
_ListRequest = (
    admin_pb2.ListWorkersRequest | admin_pb2.ListLeasesRequest | admin_pb2.ListTicketsRequest
)
_NUMBER_LENGTH = 16  # hexadecimal digits of a fencing number


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """Answers queries from `Watch`, and passes changes to the store."""

    def __init__(self, store: LeaseStore, state: SchedulerState, watch: Watch) -> None:
        self._store = store
        self._state = state
        self._watch = watch
        self._hold_times = state.hold_times
        self._workers = Pages(lambda: watch.worker_ids, str, watch.worker)
        self._leases = Pages(
            state.grants.values, _lease_key, lambda key: watch.lease(key[_NUMBER_LENGTH:])
        )
        self._tickets = Pages(
            state.tickets.values,
            lambda ticket: ticket.ticket_id,
            lambda key: watch.ticket(parse_ticket_id(key)),
        )

    async def ListWorkers(
        self, request: admin_pb2.ListWorkersRequest, context: _Context
    ) -> admin_pb2.ListWorkersResponse:
        workers, token = await self._page(self._workers, request, context)
        return admin_pb2.ListWorkersResponse(
            workers=workers, next_page_token=token, store_refusal=self._watch.store_refusal
        )

    async def ListLeases(
        self, request: admin_pb2.ListLeasesRequest, context: _Context
    ) -> admin_pb2.ListLeasesResponse:
        if request.session_id:
            return await self._leases_of(request, context)
        leases, token = await self._page(self._leases, request, context)
        return admin_pb2.ListLeasesResponse(leases=leases, next_page_token=token)

    async def _leases_of(
        self, request: admin_pb2.ListLeasesRequest, context: _Context
    ) -> admin_pb2.ListLeasesResponse:
        """Return the leases of one session: mostly one, and one more while it moves."""
        try:
            check_page(request.page_size, request.page_token)
            check_session(request.session_id)
            await self._until_known()
        except FabricError as error:
            await abort(context, error)
        grants = sorted(self._grants_of(request.session_id), key=_lease_key)
        length = min(request.page_size or PAGE_LENGTH, PAGE_LENGTH)
        leases = [lease_status(grant, self._state) for grant in grants[-length:]]
        return admin_pb2.ListLeasesResponse(leases=leases)

    def _grants_of(self, session_id: str) -> list[Grant]:
        grants = self._state.grants.values()
        return [one for one in grants if one.claims.session_id == session_id]

    async def ListTickets(
        self, request: admin_pb2.ListTicketsRequest, context: _Context
    ) -> admin_pb2.ListTicketsResponse:
        tickets, token = await self._page(self._tickets, request, context)
        return admin_pb2.ListTicketsResponse(
            tickets=tickets, next_page_token=token, ticket_limit=self._watch.ticket_limit
        )

    async def _page(
        self, pages: Pages[Any, Status], request: _ListRequest, context: _Context
    ) -> tuple[Sequence[Status], str]:
        """Return a page. Abort an invalid call, and any call while the state may be out of date."""
        try:
            check_page(request.page_size, request.page_token)
            await self._until_known()
        except FabricError as error:
            await abort(context, error)
        return await pages.page(request.page_size, request.page_token)

    async def _until_known(self) -> None:
        """Wait until the state is known. Raises UNAVAILABLE while it may be out of date."""
        self._watch.require_accepted()
        await self._store.until_read()

    # This method writes its responses and does not yield them, so that a cancelled call stops
    # immediately.
    async def Watch(  # pyright: ignore[reportIncompatibleMethodOverride]  # stubs: yields
        self,
        request: admin_pb2.WatchRequest,
        context: grpc.aio.ServicerContext[admin_pb2.WatchRequest, admin_pb2.WatchResponse],
    ) -> None:
        del request
        try:
            await self._until_known()
            async with contextlib.aclosing(self._watch.steps()) as steps:
                async for step in steps:
                    await context.write(step)
        except FabricError as error:
            await abort(context, error)

    async def DrainWorker(
        self,
        request: admin_pb2.DrainWorkerRequest,
        context: grpc.aio.ServicerContext[
            admin_pb2.DrainWorkerRequest, admin_pb2.DrainWorkerResponse
        ],
    ) -> admin_pb2.DrainWorkerResponse:
        drain = DrainRequest.STOP if request.is_stop else DrainRequest.DRAIN
        await self._drain(request.worker_id, drain, context)
        return admin_pb2.DrainWorkerResponse()

    async def UndrainWorker(
        self,
        request: admin_pb2.UndrainWorkerRequest,
        context: grpc.aio.ServicerContext[
            admin_pb2.UndrainWorkerRequest, admin_pb2.UndrainWorkerResponse
        ],
    ) -> admin_pb2.UndrainWorkerResponse:
        await self._drain(request.worker_id, DrainRequest.UNDRAIN, context)
        return admin_pb2.UndrainWorkerResponse()

    async def _drain(self, worker_id: str, request: DrainRequest, context: _Context) -> None:
        try:
            if not await self._store.drain(worker_id, request):
                message = f"no worker is attached as {worker_id!r}"
                raise FabricError(Reason.UNKNOWN_WORKER, message, field="worker_id")
        except FabricError as error:
            await abort(context, error)

    async def CancelTicket(
        self,
        request: admin_pb2.CancelTicketRequest,
        context: grpc.aio.ServicerContext[
            admin_pb2.CancelTicketRequest, admin_pb2.CancelTicketResponse
        ],
    ) -> admin_pb2.CancelTicketResponse:
        try:
            if await self._store.cancel(parse_ticket_id(request.ticket_id)):
                return admin_pb2.CancelTicketResponse()
            message = f"no ticket {request.ticket_id!r} is waiting"
            raise FabricError(Reason.UNKNOWN_TICKET, message, field="ticket_id")
        except FabricError as error:
            return await abort(context, error)

    async def EndSession(
        self,
        request: admin_pb2.EndSessionRequest,
        context: grpc.aio.ServicerContext[
            admin_pb2.EndSessionRequest, admin_pb2.EndSessionResponse
        ],
    ) -> admin_pb2.EndSessionResponse:
        try:
            check_end(request)
            await self._until_known()
            if not await self._end(request):
                named = request.session_id or request.lease_id
                field = "session_id" if request.session_id else "lease_id"
                message = f"no session with a lease or ticket is {named!r}"
                raise FabricError(Reason.UNKNOWN_SESSION, message, field=field)
        except FabricError as error:
            return await abort(context, error)
        return admin_pb2.EndSessionResponse()

    async def _end(self, request: admin_pb2.EndSessionRequest) -> bool:
        """End the sessions that a request names. Returns False if there are none."""
        state, session_id = self._state, request.session_id
        if session_id:
            grants = self._grants_of(session_id)
        else:
            named = state.grants.get(request.lease_id)
            grants = [named] if named else []
        tickets = [
            ticket
            for ticket in state.tickets.values()
            if session_id and ticket.request.session_id == session_id
        ]
        ends = [self._store.give_back(grant, is_end=True) for grant in grants]
        ends += [self._store.cancel(ticket.order) for ticket in tickets]
        return any(await asyncio.gather(*ends))

    async def GetEstimates(
        self, request: admin_pb2.GetEstimatesRequest, context: object
    ) -> admin_pb2.GetEstimatesResponse:
        del request, context
        return admin_pb2.GetEstimatesResponse(estimates=estimates(self._hold_times))

    async def UpdateEstimates(
        self,
        request: admin_pb2.UpdateEstimatesRequest,
        context: grpc.aio.ServicerContext[
            admin_pb2.UpdateEstimatesRequest, admin_pb2.UpdateEstimatesResponse
        ],
    ) -> admin_pb2.UpdateEstimatesResponse:
        try:
            check_estimates(request)
        except FabricError as error:
            return await abort(context, error)
        for base in request.bases:
            self._hold_times.base_s[base.kind] = to_seconds(base.base_duration)
        if request.HasField("smoothing"):
            self._hold_times.smoothing = request.smoothing
        return admin_pb2.UpdateEstimatesResponse(estimates=estimates(self._hold_times))


def _lease_key(grant: Grant) -> str:
    """Return the key by which leases are sorted.

    The key contains the lease id, because leases of different slots may share a fencing number.
    """
    return f"{grant.claims.fencing_number:0{_NUMBER_LENGTH}x}{grant.claims.lease_id}"
