"""LeaseService: what calls send and are told. Where they stand is decided by line and placement."""

from __future__ import annotations

import asyncio
import contextlib

import grpc.aio

from duplane.fabric.errors import FabricError, abort
from duplane.fabric.lease import LeaseSigner
from duplane.fabric.v1 import lease_pb2, lease_pb2_grpc
from duplane.scheduler.line import Line, Waiter
from duplane.scheduler.messages import granted, queued
from duplane.scheduler.placement import Placement
from duplane.scheduler.settings import SchedulerSettings
from duplane.scheduler.store.base import Grant, LeaseStore
from duplane.scheduler.view import View

_AcquireContext = grpc.aio.ServicerContext[
    lease_pb2.AcquireLeaseRequest, lease_pb2.AcquireLeaseResponse
]


class LeaseServicer(lease_pb2_grpc.LeaseServiceServicer):
    """Gives out the right to a slot, as the contract says."""

    def __init__(
        self,
        settings: SchedulerSettings,
        store: LeaseStore,
        view: View,
        line: Line,
        placement: Placement,
        signer: LeaseSigner,
    ) -> None:
        self._settings = settings
        self._store = store
        self._view = view
        self._line = line
        self._placement = placement
        self._signer = signer

    # The stubs know generators only; one that writes can tell whether a message went out.
    async def AcquireLease(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: lease_pb2.AcquireLeaseRequest, context: _AcquireContext
    ) -> None:
        try:
            async with self._line.stand(request) as waiter:
                await self._wait(waiter, context)
        except FabricError as error:
            await abort(context, error)

    async def ReleaseLease(
        self, request: lease_pb2.ReleaseLeaseRequest, context: object
    ) -> lease_pb2.ReleaseLeaseResponse:
        del context
        if request.request_id:
            self._line.abandon(request.request_id)
        for grant in self._named_by(request):
            await self._store.give_back(grant)
        return lease_pb2.ReleaseLeaseResponse()

    def _named_by(self, request: lease_pb2.ReleaseLeaseRequest) -> list[Grant]:
        if grant := self._view.grants.get(request.lease_id):
            return [grant]
        return [
            grant
            for grant in self._view.grants.values()
            if grant.ticket and grant.ticket.wish.request_id == request.request_id
        ]

    async def _wait(self, waiter: Waiter, context: _AcquireContext) -> None:
        while True:
            waiter.changed.clear()
            if waiter.failure:
                raise waiter.failure
            if waiter.has_lost_grant:
                await self._line.rejoin(waiter)
            elif waiter.grant:
                # Before the write: a caller may cancel as soon as it has read the grant, and then
                # the grant is its own. One that dies without reading lets the claim time out.
                waiter.is_delivered = True
                await context.write(self._granted(waiter.grant))
                return
            else:
                await self._tell_place(waiter, context)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._settings.queued_interval_s):
                        await waiter.changed.wait()

    async def _tell_place(self, waiter: Waiter, context: _AcquireContext) -> None:
        place = self._line.place(waiter)
        if place and not self._placement.is_due(place.ticket):
            told = queued(place, self._view)
            await context.write(lease_pb2.AcquireLeaseResponse(queued=told))

    def _granted(self, grant: Grant) -> lease_pb2.AcquireLeaseResponse:
        worker = self._view.workers[grant.worker_id]
        left_s = self._settings.claim_timeout_s - self._view.held_s(grant.lease_id)
        message = granted(grant, worker, self._signer, max(left_s, 0.0))
        return lease_pb2.AcquireLeaseResponse(granted=message)
