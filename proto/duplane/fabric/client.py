"""The client of a fabric: acquires leases, opens sessions and chats on workers, releases leases.

The edge and internal clients use this client. It tries several schedulers. If the worker of a
granted slot cannot be reached, the request returns to its place in the queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Sequence
from typing import TYPE_CHECKING, TypeVar

import grpc.aio
from cachetools import TTLCache

from duplane.fabric.addresses import parse_address, resolve
from duplane.fabric.attaching import SessionTaker, TakenSession
from duplane.fabric.avoided_workers import AvoidedWorkers
from duplane.fabric.channel_pool import ChannelPool
from duplane.fabric.converse import ConverseStream
from duplane.fabric.errors import FabricError, Reason, from_rpc
from duplane.fabric.health_checks import TIME_LIMIT_S, UNREACHABLE_CODES, HealthChecks
from duplane.fabric.lease_metadata import with_lease
from duplane.fabric.queue_positions import OnQueued, never_growing
from duplane.fabric.repeated_log import RepeatedLog
from duplane.fabric.tls.identity import Role
from duplane.fabric.v1 import (
    admin_pb2_grpc,
    lease_pb2,
    lease_pb2_grpc,
    session_pb2,
    session_pb2_grpc,
    trace_pb2,
)
from duplane.fabric.watch_stream import WatchStream, watching

if TYPE_CHECKING:
    # Not imported without TLS: it imports cryptography, which takes a tenth of a second.
    from duplane.fabric.tls.credentials import FabricCredentials

_log = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")
_AcquireCall = grpc.aio.UnaryStreamCall[
    lease_pb2.AcquireLeaseRequest, lease_pb2.AcquireLeaseResponse
]
OnGranted = Callable[[lease_pb2.Granted], None]
# If no scheduler answers, the client pauses for _RETRY_S and waits up to CONNECT_S for a
# connection. Then it calls all schedulers again.
_RETRY_S = 0.2
CONNECT_S = 0.5
# Waits for a scheduler's first answer, if there is another scheduler. A scheduler whose store is
# slow may need some seconds. One that is frozen does not answer a health check either.
FIRST_ANSWER_S = 3.0
_SILENCE_S = 0.25  # without a first answer, before each health check of the scheduler
_END_S = 0.5  # longest wait after a grant for the end of the call; then the grant is used anyway
_RELEASE_TIMEOUT_S = 2.0
_CLAIM_ATTEMPTS = 6  # failed claims after which a session is given up
FIRST_CLAIM_BACKOFF_S = 0.2  # doubled after each grant that could not be claimed
_UNREPORTED_S = 15.0  # how long it is remembered that a worker could not be reached
_MAX_UNREPORTED = 1024  # leases on unreachable workers that are not given back yet


def worker_name(granted: lease_pb2.Granted) -> str:
    """Return the name of a granted worker for logs: its id, as schedulers and workers log it.

    Schedulers of older releases do not send the id; then it is the address.
    """
    return granted.worker_id or granted.worker_address


class FabricClient:
    """Calls the schedulers, and the workers whose slots the schedulers grant to this client.

    Use as an async context manager. Every method may run for many sessions concurrently. The
    constructor raises ValueError for scheduler addresses that are not host:port. With `credentials`
    all calls use mutual TLS.
    """

    def __init__(
        self, schedulers: Sequence[str], credentials: FabricCredentials | None = None
    ) -> None:
        if not schedulers:
            raise ValueError("at least one scheduler address is needed")
        self._addresses = [str(parse_address(address, "scheduler")) for address in schedulers]
        self._schedulers: Sequence[str] = ()  # resolved addresses
        self._preferred = 0
        self._caller_key = secrets.token_bytes()  # no other process can use the leases
        self._to_schedulers = ChannelPool(Role.SCHEDULER, credentials)
        self._to_workers = ChannelPool(Role.WORKER, credentials)
        self._scheduler_checks = HealthChecks(self._to_schedulers)
        self._worker_checks = HealthChecks(self._to_workers)
        self._avoided = AvoidedWorkers(self._worker_checks)
        self._taker = SessionTaker(self, self._to_workers)
        self._connecting: asyncio.Task[None] | None = None
        self._silence = RepeatedLog(_log)
        # Lease id -> the id of its worker, for leases whose worker could not be reached.
        self._unreachable = TTLCache[str, str, float](_MAX_UNREPORTED, _UNREPORTED_S)

    async def __aenter__(self) -> FabricClient:
        await self._find_schedulers()
        return self

    async def _find_schedulers(self) -> None:
        """Resolve the schedulers' names. Channels to old addresses close after their last call."""
        self._schedulers = await resolve(self._addresses)
        self._preferred %= len(self._schedulers)
        await self._to_schedulers.close_others(self._schedulers)

    async def __aexit__(self, *_: object) -> None:
        if self._connecting:
            self._connecting.cancel()
            await asyncio.wait([self._connecting])
        await self._avoided.close()
        await self._scheduler_checks.close()
        await self._worker_checks.close()
        await self._to_schedulers.close()
        await self._to_workers.close()

    async def administer(
        self, call: Callable[[admin_pb2_grpc.AdminServiceAsyncStub], Awaitable[_Answer]]
    ) -> _Answer:
        """Make a call to AdminService. If a scheduler does not answer, call the next one.

        This is safe, because every call of AdminService can be repeated. `call` should set a
        timeout, which then applies to each scheduler. Raises FabricError.
        """
        failure = FabricError(Reason.UNAVAILABLE, "no scheduler answers")
        for scheduler in self._in_order():
            try:
                async with self._to_schedulers.use(scheduler) as channel:
                    return await call(admin_pb2_grpc.AdminServiceStub(channel))
            except grpc.aio.AioRpcError as error:
                failure = from_rpc(error)
                if error.code() not in UNREACHABLE_CODES:
                    break
        raise failure

    def watch(self) -> contextlib.AbstractAsyncContextManager[WatchStream]:
        """Return a call of AdminService.Watch at the first scheduler that answers."""
        return watching(self._to_schedulers, self._in_order())

    def _in_order(self) -> Sequence[str]:
        return [*self._schedulers[self._preferred :], *self._schedulers[: self._preferred]]

    async def acquire(
        self, request: lease_pb2.AcquireLeaseRequest, on_queued: OnQueued | None = None
    ) -> lease_pb2.Granted:
        """Wait for a slot, without a time limit. Cancel the call to leave the queue immediately.

        If a scheduler dies or cannot be reached, the client sends the same ticket to the next
        scheduler. While no scheduler answers, the client keeps trying. Raises FabricError if a
        scheduler refuses the request.
        """
        current = lease_pb2.AcquireLeaseRequest()
        current.CopyFrom(request)
        on_queued = on_queued and never_growing(on_queued)
        current.caller_key = self._caller_key
        own_avoided = self._avoided.own(request)
        for attempt in itertools.count(1):
            self._avoided.write(current, own_avoided)
            used = self._preferred
            try:
                granted = await self._acquire_once(self._schedulers[used], current, on_queued)
            except FabricError as error:
                if error.reason is not Reason.UNAVAILABLE:
                    raise
                self._silence.report(f"no scheduler answers: {error.message}")
            else:
                self._silence.resolve("a scheduler answers again")
                return granted
            if self._preferred == used:  # no other request has chosen another scheduler meanwhile
                self._preferred = (used + 1) % len(self._schedulers)
            if attempt % len(self._schedulers) == 0:
                await asyncio.sleep(_RETRY_S * random.uniform(0.5, 1.0))
                await self._until_connected()
                await self._find_schedulers()
        raise AssertionError("itertools.count does not end")

    async def _until_connected(self) -> None:
        """Wait a limited time for a connection to any scheduler. All requests share one wait."""
        if self._connecting is None or self._connecting.done():
            connecting = self._to_schedulers.until_any_ready(self._schedulers, CONNECT_S)
            self._connecting = asyncio.create_task(connecting)
        await asyncio.wait([self._connecting])

    async def _acquire_once(
        self,
        scheduler: str,
        request: lease_pb2.AcquireLeaseRequest,
        on_queued: OnQueued | None,
    ) -> lease_pb2.Granted:
        """Acquire a lease from one scheduler. Writes the assigned ticket to `request`."""
        async with self._to_schedulers.use(scheduler) as channel:
            call = lease_pb2_grpc.LeaseServiceStub(channel).AcquireLease(request)
            return await self._read_grant(call, request, on_queued, scheduler)

    async def _read_grant(
        self,
        call: _AcquireCall,
        request: lease_pb2.AcquireLeaseRequest,
        on_queued: OnQueued | None,
        scheduler: str,
    ) -> lease_pb2.Granted:
        """Return the grant from the stream of one call. Write the ticket to `request`."""
        granted: lease_pb2.Granted | None = None
        try:
            # Read the stream to its end. If the client cancelled the call after the grant, it would
            # be unclear to the scheduler whether the grant has arrived.
            async with self._waiting(scheduler) as (limit, watch):
                async for response in call:
                    watch.cancel()
                    limit.reschedule(None)
                    if response.WhichOneof("event") == "granted":
                        granted = response.granted
                        limit.reschedule(asyncio.get_running_loop().time() + _END_S)
                        continue
                    request.ticket_id = response.queued.ticket_id
                    request.ticket_proof = response.queued.ticket_proof
                    if on_queued:
                        await on_queued(response.queued)
        except TimeoutError:
            if granted is None:
                raise FabricError(Reason.UNAVAILABLE, "the scheduler does not answer") from None
        except grpc.aio.AioRpcError as error:
            if granted is None:
                raise from_rpc(error) from None
        except asyncio.CancelledError:
            # Give back a grant that is still on its way, or that was read and will not be used.
            call.cancel()
            cancelled = lease_pb2.ReleaseLeaseRequest(request_id=request.request_id)
            await asyncio.shield(self._release(cancelled))
            raise
        finally:
            call.cancel()
        if granted is None:
            raise FabricError(Reason.UNAVAILABLE, "the scheduler ended the call without a grant")
        return granted

    @contextlib.asynccontextmanager
    async def _waiting(
        self, scheduler: str
    ) -> AsyncGenerator[tuple[asyncio.Timeout, asyncio.Task[None]]]:
        """Limit the wait for the first answer of a scheduler. Yield the limit and its watch."""
        has_others = len(self._schedulers) > 1
        async with asyncio.timeout(FIRST_ANSWER_S if has_others else None) as limit:
            watch = asyncio.create_task(self._end_if_frozen(scheduler, limit))
            if not has_others:
                watch.cancel()
            try:
                yield limit, watch
            finally:
                watch.cancel()

    async def _end_if_frozen(self, scheduler: str, limit: asyncio.Timeout) -> None:
        """End a wait when the scheduler does not answer a health check."""
        answers = True
        while answers:
            await asyncio.sleep(_SILENCE_S)
            answers = await self._scheduler_checks.answers(scheduler, TIME_LIMIT_S)
        limit.reschedule(asyncio.get_running_loop().time())

    async def _give_back(self, lease_id: str, streams: Sequence[ConverseStream]) -> None:
        """Give a lease back, unless another client has its session."""
        if not any(stream.is_superseded for stream in streams):
            await self.release(lease_id)

    def take_session(
        self, attach: session_pb2.Attach, pool: str
    ) -> contextlib.AbstractAsyncContextManager[TakenSession]:
        """Take a session that another client had; hold it during the body of the `with`.

        Raises FabricError: UNKNOWN_SESSION if no worker of the pool has it, UNAVAILABLE if it may
        be there later.
        """
        return self._taker.taken(attach, pool)

    async def release(self, lease_id: str) -> None:
        """Give a lease back. If the scheduler does not answer, the slot is freed later."""
        lost_id = self._unreachable.pop(lease_id, "")
        request = lease_pb2.ReleaseLeaseRequest(lease_id=lease_id, unreachable_worker_id=lost_id)
        await self._release(request)

    async def _release(self, request: lease_pb2.ReleaseLeaseRequest) -> None:
        request.caller_key = self._caller_key
        try:
            async with self._to_schedulers.use(self._schedulers[self._preferred]) as channel:
                stub = lease_pb2_grpc.LeaseServiceStub(channel)
                await stub.ReleaseLease(request, timeout=_RELEASE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            self._silence.report(f"a lease was not released: {from_rpc(error)}")

    @contextlib.asynccontextmanager
    async def converse(
        self, granted: lease_pb2.Granted, trace: trace_pb2.TraceContext | None = None
    ) -> AsyncGenerator[ConverseStream]:
        """Claim the granted slot; hold it during the body of the `with`. Raises FabricError."""
        async with self._to_workers.use(granted.worker_address) as channel:
            metadata = with_lease(granted.lease)
            call = session_pb2_grpc.SessionServiceStub(channel).Converse(metadata=metadata)
            stream = ConverseStream(call, granted)
            try:
                with self._note_unreachable(granted):
                    await stream.claim_slot(trace)
                yield stream
            finally:
                await stream.finish()

    @contextlib.asynccontextmanager
    async def session(
        self,
        request: lease_pb2.AcquireLeaseRequest,
        on_queued: OnQueued | None = None,
        trace: trace_pb2.TraceContext | None = None,
        on_granted: OnGranted | None = None,
    ) -> AsyncGenerator[ConverseStream]:
        """Acquire a lease and claim its slot; the slot is held during the body of the `with`.

        If a granted slot cannot be claimed, the lease is given back and the request returns to
        its place in the queue, after a pause that doubles each time. `on_granted` may raise
        FabricError: then the lease is given back unclaimed, and the request ends. Raises
        FabricError.
        """
        current = lease_pb2.AcquireLeaseRequest()
        current.CopyFrom(request)

        async def keep_ticket(queued: lease_pb2.Queued) -> None:
            current.ticket_id, current.ticket_proof = queued.ticket_id, queued.ticket_proof
            if on_queued:
                await on_queued(queued)

        pass_on = never_growing(keep_ticket)
        for attempt in range(_CLAIM_ATTEMPTS):
            current.request_id = f"{request.request_id}/{attempt}"
            granted = await self.acquire(current, pass_on)
            current.ticket_id, current.ticket_proof = granted.ticket_id, granted.ticket_proof
            current.was_granted = bool(granted.ticket_id)
            async with contextlib.AsyncExitStack() as stack:
                streams = list[ConverseStream]()
                stack.push_async_callback(self._give_back, granted.lease_id, streams)
                if on_granted:
                    on_granted(granted)
                try:
                    stream = await stack.enter_async_context(self.converse(granted, trace))
                except FabricError as error:
                    _log.warning("worker %s: claim failed: %s", worker_name(granted), error)
                else:
                    streams.append(stream)
                    yield stream
                    return
            await asyncio.sleep(FIRST_CLAIM_BACKOFF_S * 2**attempt * random.uniform(0.5, 1.0))
        raise FabricError(Reason.UNAVAILABLE, "no granted worker could be reached")

    async def is_alive(self, worker_address: str, within_s: float) -> bool:
        """Return whether a worker answers a health check at all, whatever the answer is."""
        return await self._worker_checks.answers(worker_address, within_s)

    @contextlib.asynccontextmanager
    async def chat(
        self, granted: lease_pb2.Granted, request: session_pb2.ChatRequest
    ) -> AsyncGenerator[AsyncIterator[session_pb2.ChatResponse]]:
        """Yield the responses of one turn of chat on the granted slot.

        The end of the `with` body stops the turn.
        """
        async with self._to_workers.use(granted.worker_address) as channel:
            turn = session_pb2.ChatRequest()
            turn.CopyFrom(request)
            turn.lease.CopyFrom(granted.lease)
            metadata = with_lease(granted.lease)
            call = session_pb2_grpc.SessionServiceStub(channel).Chat(turn, metadata=metadata)
            try:
                yield self._chat_responses(call, granted)
            finally:
                call.cancel()

    async def _chat_responses(
        self,
        call: grpc.aio.UnaryStreamCall[session_pb2.ChatRequest, session_pb2.ChatResponse],
        granted: lease_pb2.Granted,
    ) -> AsyncIterator[session_pb2.ChatResponse]:
        with self._note_unreachable(granted):
            try:
                async for response in call:
                    yield response
            except grpc.aio.AioRpcError as error:
                raise from_rpc(error) from None

    @contextlib.contextmanager
    def _note_unreachable(self, granted: lease_pb2.Granted) -> Generator[None]:
        """Remember a worker that did not answer: `acquire` avoids it, `release` reports it."""
        try:
            yield
        except FabricError as error:
            if error.reason is Reason.UNAVAILABLE:
                self.report_unreachable(granted)
            raise

    def report_unreachable(self, granted: lease_pb2.Granted) -> None:
        """Record that a worker is lost: `acquire` then avoids it, and `release` reports it."""
        if granted.worker_id:
            self._avoided.add(granted)
            self._unreachable[granted.lease_id] = granted.worker_id
