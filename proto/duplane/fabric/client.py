"""The fabric as a client sees it: acquire a lease, converse, chat, release.

The edge uses it, and so can any internal client; it hides which scheduler answered and which
worker was granted, and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

import grpc.aio

from duplane.fabric.channel import open_channel
from duplane.fabric.errors import FabricError, Reason, from_rpc
from duplane.fabric.v1 import (
    admin_pb2_grpc,
    lease_pb2,
    lease_pb2_grpc,
    session_pb2,
    session_pb2_grpc,
    trace_pb2,
)

_log = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")
OnQueued = Callable[[lease_pb2.Queued], Awaitable[None]]
_SILENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
_RETRY_S = 0.5  # between schedulers that do not answer
_LOG_EVERY = 20  # tries; the log must not grow with the number of waiting sessions
_RELEASE_TIMEOUT_S = 2.0
_CLOSE_TIMEOUT_S = 1.0
_CLAIM_ATTEMPTS = 5  # grants whose worker could not be claimed, before giving up
_WORKER_CHANNELS = 256  # channels kept open to workers; the least recently used is closed


class ConverseStream:
    """The client's side of one Converse call, claimed. Not safe for several writers at once."""

    def __init__(
        self,
        call: grpc.aio.StreamStreamCall[session_pb2.ConverseRequest, session_pb2.ConverseResponse],
        granted: lease_pb2.Granted,
    ) -> None:
        self._call = call
        self.granted = granted
        self.claimed = session_pb2.Claimed()  # set once the worker has said so

    async def open(self, settings: session_pb2.Open) -> session_pb2.Opened:
        """Configure the conversation. Raises FabricError."""
        await self.write(session_pb2.ConverseRequest(open=settings))
        response = await self.read()
        if response.WhichOneof("message") == "closed":
            raise FabricError(Reason.UNAVAILABLE, response.closed.message or "session closed")
        return response.opened

    async def send(self, unit: session_pb2.Unit) -> None:
        """Send one unit; waits while the worker's host is slower than the client."""
        await self.write(session_pb2.ConverseRequest(unit=unit))

    async def close(self, reason: str = "") -> None:
        """Ask for an orderly end; `closed` follows among the responses."""
        await self.write(session_pb2.ConverseRequest(close=session_pb2.Close(reason=reason)))

    async def write(self, request: session_pb2.ConverseRequest) -> None:
        """Send any message. Raises FabricError when the call has ended."""
        try:
            await self._call.write(request)
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error) from None
        except asyncio.InvalidStateError:
            # grpc.aio says so, and no more, of a call that has ended.
            raise await self._failure() from None

    async def read(self) -> session_pb2.ConverseResponse:
        """Receive one message. Raises FabricError when the call has ended."""
        try:
            response = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error) from None
        if isinstance(response, session_pb2.ConverseResponse):
            return response
        raise await self._failure()

    async def responses(self) -> AsyncIterator[session_pb2.ConverseResponse]:
        """Yield what the worker says, up to and with `closed`."""
        while True:
            response = await self.read()
            yield response
            if response.WhichOneof("message") == "closed":
                return

    async def _failure(self) -> FabricError:
        code, details = await self._call.code(), await self._call.details()
        if code == grpc.StatusCode.OK:
            return FabricError(Reason.UNAVAILABLE, "the worker ended the call")
        return from_rpc(
            grpc.aio.AioRpcError(
                code,
                await self._call.initial_metadata(),
                await self._call.trailing_metadata(),
                details=details,
            )
        )

    async def end_input(self) -> None:
        """Half-close: an orderly end whose last responses can still be read."""
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self._call.done_writing()

    async def finish(self) -> None:
        """Half-close, give the worker a moment to end the call, then cancel it."""
        try:
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
                async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                    await self._call.done_writing()
                    while await self._call.read() is not grpc.aio.EOF:
                        pass
        finally:
            self._call.cancel()


class FabricClient:
    """Talks to one of several schedulers, and to the workers they name.

    Use as an async context manager. Every method may be called for many sessions at once.
    """

    def __init__(self, schedulers: Sequence[str]) -> None:
        if not schedulers:
            raise ValueError("at least one scheduler address is needed")
        self._schedulers = [open_channel(address) for address in schedulers]
        self._preferred = 0
        self._workers: dict[str, grpc.aio.Channel] = {}
        self._worker_users: dict[str, int] = {}

    async def __aenter__(self) -> FabricClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        for channel in (*self._schedulers, *self._workers.values()):
            await channel.close()

    async def administer(
        self, call: Callable[[admin_pb2_grpc.AdminServiceAsyncStub], Awaitable[_Answer]]
    ) -> _Answer:
        """Make a call to AdminService, at the next scheduler where one does not answer.

        Every call of that service can be made twice. It should have a timeout, which holds for
        each scheduler. Raises FabricError.
        """
        failure = FabricError(Reason.UNAVAILABLE, "no scheduler answers")
        for offset in range(len(self._schedulers)):
            at = (self._preferred + offset) % len(self._schedulers)
            try:
                return await call(admin_pb2_grpc.AdminServiceStub(self._schedulers[at]))
            except grpc.aio.AioRpcError as error:
                failure = from_rpc(error)
                if error.code() not in _SILENT:
                    break
        raise failure

    async def acquire(
        self, request: lease_pb2.AcquireLeaseRequest, on_queued: OnQueued | None = None
    ) -> lease_pb2.Granted:
        """Wait for a slot, however long; cancel to leave the queue at once.

        A scheduler that dies or cannot be reached is replaced by the next, the place kept; with
        none left to try the wait goes on until one answers. Raises FabricError for refusals.
        """
        wish = lease_pb2.AcquireLeaseRequest()
        wish.CopyFrom(request)
        for attempt in itertools.count(1):
            try:
                return await self._acquire_once(wish, on_queued)
            except FabricError as error:
                if error.reason is not Reason.UNAVAILABLE:
                    raise
                if attempt % _LOG_EVERY == 1:
                    _log.warning("no scheduler answers (try %d): %s", attempt, error.message)
            self._preferred = (self._preferred + 1) % len(self._schedulers)
            if attempt % len(self._schedulers) == 0:
                await asyncio.sleep(_RETRY_S)
        raise AssertionError("itertools.count does not end")

    async def _acquire_once(
        self, wish: lease_pb2.AcquireLeaseRequest, on_queued: OnQueued | None
    ) -> lease_pb2.Granted:
        stub = lease_pb2_grpc.LeaseServiceStub(self._schedulers[self._preferred])
        call = stub.AcquireLease(wish)
        granted: lease_pb2.Granted | None = None
        try:
            # Read to the end: a call cancelled in mid-grant leaves the scheduler in doubt.
            async for response in call:
                if response.WhichOneof("event") == "granted":
                    granted = response.granted
                    continue
                wish.ticket_id = response.queued.ticket_id
                if on_queued:
                    await on_queued(response.queued)
        except grpc.aio.AioRpcError as error:
            if granted is None:
                raise from_rpc(error) from None
        except asyncio.CancelledError:
            # A grant may be on its way, or read and not yet used.
            call.cancel()
            given_up = lease_pb2.ReleaseLeaseRequest(request_id=wish.request_id)
            await asyncio.shield(self._release(given_up))
            raise
        finally:
            call.cancel()
        if granted is None:
            raise FabricError(Reason.UNAVAILABLE, "the scheduler ended the call without a grant")
        return granted

    async def release(self, lease_id: str) -> None:
        """Give a lease back; one that cannot be delivered expires by itself."""
        await self._release(lease_pb2.ReleaseLeaseRequest(lease_id=lease_id))

    async def _release(self, request: lease_pb2.ReleaseLeaseRequest) -> None:
        stub = lease_pb2_grpc.LeaseServiceStub(self._schedulers[self._preferred])
        try:
            await stub.ReleaseLease(request, timeout=_RELEASE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            _log.warning("a lease was not released: %s", from_rpc(error))

    @contextlib.asynccontextmanager
    async def converse(
        self, granted: lease_pb2.Granted, trace: trace_pb2.TraceContext | None = None
    ) -> AsyncGenerator[ConverseStream]:
        """Claim the granted slot and hold it for the body of the `with`. Raises FabricError."""
        async with self._worker(granted.worker_address) as channel:
            call = session_pb2_grpc.SessionServiceStub(channel).Converse()
            stream = ConverseStream(call, granted)
            try:
                claim = session_pb2.Claim(lease=granted.lease, trace=trace)
                try:
                    async with asyncio.timeout(granted.claim_timeout.ToTimedelta().total_seconds()):
                        await stream.write(session_pb2.ConverseRequest(claim=claim))
                        stream.claimed.CopyFrom((await stream.read()).claimed)
                except TimeoutError:
                    raise FabricError(Reason.UNAVAILABLE, "the worker did not answer") from None
                yield stream
            finally:
                await stream.finish()

    @contextlib.asynccontextmanager
    async def session(
        self,
        request: lease_pb2.AcquireLeaseRequest,
        on_queued: OnQueued | None = None,
        trace: trace_pb2.TraceContext | None = None,
    ) -> AsyncGenerator[ConverseStream]:
        """Acquire and claim: the body runs with a slot that is really held.

        A grant whose worker has died meanwhile goes back and the next is waited for, from the
        old place. Raises FabricError.
        """
        wish = lease_pb2.AcquireLeaseRequest()
        wish.CopyFrom(request)

        async def remember(queued: lease_pb2.Queued) -> None:
            wish.ticket_id = queued.ticket_id
            if on_queued:
                await on_queued(queued)

        for attempt in range(_CLAIM_ATTEMPTS):
            wish.request_id = f"{request.request_id}/{attempt}"
            granted = await self.acquire(wish, remember)
            wish.ticket_id = granted.ticket_id
            async with contextlib.AsyncExitStack() as stack:
                stack.push_async_callback(self.release, granted.lease_id)
                try:
                    stream = await stack.enter_async_context(self.converse(granted, trace))
                except FabricError as error:
                    _log.warning("grant %s could not be claimed: %s", granted.lease_id, error)
                    continue
                yield stream
                return
        raise FabricError(Reason.UNAVAILABLE, "no granted worker could be reached")

    @contextlib.asynccontextmanager
    async def chat(
        self, granted: lease_pb2.Granted, request: session_pb2.ChatRequest
    ) -> AsyncGenerator[AsyncIterator[session_pb2.ChatResponse]]:
        """Run one turn of chat on the granted slot; leaving the body stops it."""
        async with self._worker(granted.worker_address) as channel:
            turn = session_pb2.ChatRequest()
            turn.CopyFrom(request)
            turn.lease.CopyFrom(granted.lease)
            call = session_pb2_grpc.SessionServiceStub(channel).Chat(turn)
            try:
                yield _chat_responses(call)
            finally:
                call.cancel()

    @contextlib.asynccontextmanager
    async def _worker(self, address: str) -> AsyncGenerator[grpc.aio.Channel]:
        """Lend the one channel to a worker; idle ones beyond the bound are closed, oldest first."""
        channel = self._workers.pop(address, None) or open_channel(address)
        self._workers[address] = channel
        self._worker_users[address] = self._worker_users.get(address, 0) + 1
        try:
            yield channel
        finally:
            self._worker_users[address] -= 1
            await self._close_idle()

    async def _close_idle(self) -> None:
        for address in list(self._workers)[: max(0, len(self._workers) - _WORKER_CHANNELS)]:
            if self._worker_users[address] == 0:
                del self._worker_users[address]
                await self._workers.pop(address).close()


async def _chat_responses(
    call: grpc.aio.UnaryStreamCall[session_pb2.ChatRequest, session_pb2.ChatResponse],
) -> AsyncIterator[session_pb2.ChatResponse]:
    try:
        async for response in call:
            yield response
    except grpc.aio.AioRpcError as error:
        raise from_rpc(error) from None
