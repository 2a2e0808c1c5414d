"""LeaseService: the gRPC calls that acquire and release leases."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Generator

import grpc.aio
from opentelemetry.trace import Span, StatusCode

from duplane.fabric.errors import FabricError, abort
from duplane.fabric.kinds import kind_name
from duplane.fabric.monitoring.logs import logged_ids
from duplane.fabric.monitoring.spans import (
    ERROR_TYPE,
    LEASE_ID,
    SCHEDULER_QUEUE,
    SESSION_ID,
    SESSION_KIND,
    Telemetry,
    from_metadata,
)
from duplane.fabric.tls.identity import Identity, Role
from duplane.fabric.tls.peers import peer_holder, peer_identity
from duplane.fabric.v1 import lease_pb2, lease_pb2_grpc
from duplane.scheduler.granting import GrantLoop
from duplane.scheduler.holders import holder_of, is_open_to, scoped
from duplane.scheduler.messages import granted, queued
from duplane.scheduler.metrics import SchedulerMetrics
from duplane.scheduler.settings import SchedulerSettings
from duplane.scheduler.signing import LeaseKeys
from duplane.scheduler.state import SchedulerState
from duplane.scheduler.store.base import Grant, LeaseStore
from duplane.scheduler.validation import check_acquire, check_release
from duplane.scheduler.waiters import Waiter, Waiters

_log = logging.getLogger(__name__)

_AcquireContext = grpc.aio.ServicerContext[
    lease_pb2.AcquireLeaseRequest, lease_pb2.AcquireLeaseResponse
]
_ReleaseContext = grpc.aio.ServicerContext[
    lease_pb2.ReleaseLeaseRequest, lease_pb2.ReleaseLeaseResponse
]


class LeaseServicer(lease_pb2_grpc.LeaseServiceServicer):
    """Sends callers their positions and grants; `Waiters` and `GrantLoop` produce them."""

    def __init__(
        self,
        settings: SchedulerSettings,
        store: LeaseStore,
        state: SchedulerState,
        waiters: Waiters,
        grant_loop: GrantLoop,
        keys: LeaseKeys,
        telemetry: Telemetry,
        metrics: SchedulerMetrics,
    ) -> None:
        self._settings = settings
        self._store = store
        self._state = state
        self._waiters = waiters
        self._grant_loop = grant_loop
        self._keys = keys
        self._telemetry = telemetry
        self._metrics = metrics

    # This method writes its responses and does not yield them: `write` returns after the response
    # was sent, a `yield` may return earlier.
    async def AcquireLease(  # pyright: ignore[reportIncompatibleMethodOverride]  # stubs: yields
        self, request: lease_pb2.AcquireLeaseRequest, context: _AcquireContext
    ) -> None:
        metadata = context.invocation_metadata() or ()
        if not request.trace.traceparent:
            request.trace.CopyFrom(from_metadata(metadata))
        with logged_ids(request.session_id, request.trace):
            try:
                check_acquire(request)
                secrets = _take_secrets(request, peer_holder(context))
                with self._queue_span(request) as span:
                    async with self._waiters.waiting(request, *secrets) as waiter:
                        await self._wait(waiter, context)
                        if waiter.grant:
                            claims = waiter.grant.claims
                            span.set_attribute(LEASE_ID, claims.lease_id)
                            _log.debug("lease %s on worker %s", claims.lease_id, claims.worker_id)
            except FabricError as error:
                self._metrics.refused(error)
                _log.debug("no lease: %s", error.reason)
                await abort(context, error)

    async def ReleaseLease(
        self, request: lease_pb2.ReleaseLeaseRequest, context: _ReleaseContext
    ) -> lease_pb2.ReleaseLeaseResponse:
        try:
            return await self._release(request, peer_identity(context))
        except FabricError as error:
            return await abort(context, error)

    async def _release(
        self, request: lease_pb2.ReleaseLeaseRequest, caller: Identity | None
    ) -> lease_pb2.ReleaseLeaseResponse:
        """Give a lease back. Without TLS there is no `caller`, and only its key is checked."""
        check_release(request)
        holder = caller.holder if caller else holder_of(request.caller_key)
        request_id = scoped(request.request_id, holder) if request.request_id else ""
        if request_id:
            self._waiters.cancel_request(request_id)
        if caller is None or caller.role is Role.EDGE:
            self._state.report_unreachable(request.unreachable_worker_id)
        grant = self._state.grants.get(request.lease_id)
        grant = grant or self._state.grant_of_request(request_id)
        is_operator = caller is not None and caller.role is Role.OPERATOR
        if grant and (is_operator or is_open_to(grant.holder, holder)):
            await self._store.give_back(grant)
        return lease_pb2.ReleaseLeaseResponse()

    @contextlib.contextmanager
    def _queue_span(self, request: lease_pb2.AcquireLeaseRequest) -> Generator[Span]:
        """Record the wait for a slot as a span of the caller's trace."""
        span = self._telemetry.start(
            SCHEDULER_QUEUE,
            parent=request.trace,
            attributes={SESSION_ID: request.session_id, SESSION_KIND: kind_name(request.kind)},
        )
        try:
            yield span
        except FabricError as error:
            span.set_attribute(ERROR_TYPE, error.reason)
            span.set_status(StatusCode.ERROR, error.message)
            raise
        except asyncio.CancelledError:
            span.set_attribute(ERROR_TYPE, "cancelled")
            raise
        finally:
            span.end()

    async def _wait(self, waiter: Waiter, context: _AcquireContext) -> None:
        """Send positions until the waiter has a grant, then send the grant."""
        while True:
            waiter.changed.clear()
            if waiter.failure:
                raise waiter.failure
            if waiter.has_lost_place:
                await self._waiters.enqueue_again(waiter)
            elif waiter.grant:
                # The grant counts as delivered before the write: the caller may read the grant, end
                # the call before `write` returns, and use the grant. If the caller dies before it
                # reads the grant, the claim times out.
                waiter.is_delivered = True
                await context.write(self._granted(waiter.grant))
                return
            else:
                # If a slot is free now, the caller gets the grant without a `queued` message first.
                await self._grant_loop.settled(waiter.order)
                if not waiter.changed.is_set():
                    self._waiters.check_model(waiter.request)
                    await self._send_position(waiter, context)
                    await self._wait_for_change(waiter)

    async def _wait_for_change(self, waiter: Waiter) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.queued_interval_s):
                await waiter.changed.wait()

    async def _send_position(self, waiter: Waiter, context: _AcquireContext) -> None:
        if entry := self._waiters.entry(waiter):
            message = queued(entry, self._state, self._store.ticket_key)
            # If the store lost the ticket, the waiter has a new entry in the queue, perhaps with a
            # higher position. The caller is never sent a higher position than the one before.
            message.position = waiter.position = min(waiter.position, message.position)
            if waiter.request.wants_queue_token:
                message.queue_token = self._waiters.queue_token(entry.ticket)
            await context.write(lease_pb2.AcquireLeaseResponse(queued=message))

    def _granted(self, grant: Grant) -> lease_pb2.AcquireLeaseResponse:
        claims = grant.claims
        left_s = self._settings.claim_timeout_s - self._state.held_s(claims.lease_id)
        worker = self._state.workers[claims.worker_id]
        message = granted(grant, worker, self._keys, left_s, self._store.ticket_key)
        return lease_pb2.AcquireLeaseResponse(granted=message)


def _take_secrets(
    request: lease_pb2.AcquireLeaseRequest, peer: bytes | None
) -> tuple[bytes, bytes, str]:
    """Return holder, ticket's proof and queue token of a request, and leave no secret in it.

    With TLS, the holder is `peer`, the process that the caller's certificate names. Stores keep
    the request. Its id becomes unique among the requests of all holders.
    """
    holder = holder_of(request.caller_key) if peer is None else peer
    proof, queue_token = request.ticket_proof, request.queue_token
    for secret in ("caller_key", "ticket_proof", "queue_token"):
        request.ClearField(secret)
    request.request_id = scoped(request.request_id, holder)
    return holder, proof, queue_token
