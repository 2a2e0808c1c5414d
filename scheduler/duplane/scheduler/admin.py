"""AdminService: what operators ask for and ask to be done."""

from __future__ import annotations

import contextlib

import grpc.aio

from duplane.fabric.errors import FabricError, Reason, abort
from duplane.fabric.v1 import admin_pb2, admin_pb2_grpc
from duplane.scheduler.checks import check_estimates, parse_ticket_id
from duplane.scheduler.estimate import HoldTimes
from duplane.scheduler.feed import Feed
from duplane.scheduler.messages import estimates
from duplane.scheduler.store.base import LeaseStore


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """Shows and steers a fabric, as the contract says."""

    def __init__(self, store: LeaseStore, feed: Feed, hold_times: HoldTimes) -> None:
        self._store = store
        self._feed = feed
        self._hold_times = hold_times

    async def ListWorkers(
        self, request: admin_pb2.ListWorkersRequest, context: object
    ) -> admin_pb2.ListWorkersResponse:
        del request, context
        return admin_pb2.ListWorkersResponse(workers=self._feed.workers())

    async def ListLeases(
        self, request: admin_pb2.ListLeasesRequest, context: object
    ) -> admin_pb2.ListLeasesResponse:
        del request, context
        return admin_pb2.ListLeasesResponse(leases=self._feed.leases())

    async def ListTickets(
        self, request: admin_pb2.ListTicketsRequest, context: object
    ) -> admin_pb2.ListTicketsResponse:
        del request, context
        return admin_pb2.ListTicketsResponse(
            tickets=self._feed.tickets(), ticket_limit=self._feed.ticket_limit
        )

    # The stubs know generators only; one that writes is ended where it waits.
    async def Watch(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        request: admin_pb2.WatchRequest,
        context: grpc.aio.ServicerContext[admin_pb2.WatchRequest, admin_pb2.WatchResponse],
    ) -> None:
        del request
        try:
            async with contextlib.aclosing(self._feed.watch()) as steps:
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
        if await self._store.drain(request.worker_id):
            return admin_pb2.DrainWorkerResponse()
        message = f"no worker is attached as {request.worker_id!r}"
        return await abort(context, FabricError(Reason.UNKNOWN_WORKER, message, field="worker_id"))

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
            message = f"no ticket {request.ticket_id!r} waits"
            raise FabricError(Reason.UNKNOWN_TICKET, message, field="ticket_id")
        except FabricError as error:
            return await abort(context, error)

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
            self._hold_times.base_s[base.kind] = base.base_duration.ToTimedelta().total_seconds()
        if request.HasField("smoothing"):
            self._hold_times.smoothing = request.smoothing
        return admin_pb2.UpdateEstimatesResponse(estimates=estimates(self._hold_times))
