"""One session of a client at a worker: the client's side of a Converse call."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc.aio

from duplane.fabric.durations import to_seconds
from duplane.fabric.errors import FabricError, Reason, from_rpc
from duplane.fabric.v1 import lease_pb2, session_pb2, trace_pb2

_CLOSE_TIMEOUT_S = 1.0
# A grant may arrive shortly before its claim timeout. If a worker has less time than this and does
# not answer, this does not mean that the worker is unreachable.
_LEAST_ANSWER_S = 0.5
# The exceptions that grpc.aio raises from a half-close when the call has failed. It raises the last
# one if the connection is lost during the half-close.
_ENDED = (grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.InternalError)


class ConverseStream:
    """The client's side of one Converse call. Only one task at a time may write."""

    def __init__(
        self,
        call: grpc.aio.StreamStreamCall[session_pb2.ConverseRequest, session_pb2.ConverseResponse],
        granted: lease_pb2.Granted,
    ) -> None:
        self._call = call
        self.granted = granted
        self.is_superseded = False  # another client has the session
        self.claimed = session_pb2.Claimed()  # the worker's answer to the claim; empty until then

    async def claim_slot(self, trace: trace_pb2.TraceContext | None) -> None:
        """Claim the granted slot within the grant's claim timeout.

        Raises FabricError if the worker refuses or does not answer. The reason is UNAVAILABLE only
        if the worker had time to answer.
        """
        answer_s = to_seconds(self.granted.claim_timeout)
        claim = session_pb2.Claim(lease=self.granted.lease, trace=trace)
        try:
            async with asyncio.timeout(answer_s):
                await self.write(session_pb2.ConverseRequest(claim=claim))
                self.claimed.CopyFrom((await self.read()).claimed)
        except TimeoutError:
            if answer_s < _LEAST_ANSWER_S:
                raise FabricError(Reason.LEASE_STALE, "the grant arrived too late") from None
            raise FabricError(Reason.UNAVAILABLE, "the worker did not answer") from None

    async def open(self, settings: session_pb2.Open) -> session_pb2.Opened:
        """Configure the conversation. Raises FabricError."""
        await self.write(session_pb2.ConverseRequest(open=settings))
        while (response := await self.read()).WhichOneof("message") not in ("opened", "closed"):
            pass  # the worker opens the conversation, although it drains
        if response.WhichOneof("message") == "closed":
            raise FabricError(Reason.UNAVAILABLE, response.closed.message or "session closed")
        return response.opened

    async def send(self, unit: session_pb2.Unit) -> None:
        """Send one unit; waits while the connection to the worker is full."""
        await self.write(session_pb2.ConverseRequest(unit=unit))

    async def close(self, reason: str = "", *, keep_copy: bool = False) -> None:
        """Ask the worker to end the session; the last response is then `closed`.

        With `keep_copy` the worker keeps its copy of the session.
        """
        close = session_pb2.Close(reason=reason, keep_copy=keep_copy)
        await self.write(session_pb2.ConverseRequest(close=close))

    async def write(self, request: session_pb2.ConverseRequest) -> None:
        """Send any message. Raises FabricError when the call has ended."""
        try:
            await self._call.write(request)
        except grpc.aio.AioRpcError as error:
            raise self._noted(from_rpc(error)) from None
        except asyncio.InvalidStateError:  # raised by grpc.aio when the call has ended
            raise self._noted(await self._failure()) from None

    async def read(self) -> session_pb2.ConverseResponse:
        """Receive one message. Raises FabricError when the call has ended."""
        try:
            response = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise self._noted(from_rpc(error)) from None
        if isinstance(response, session_pb2.ConverseResponse):
            return response
        raise self._noted(await self._failure())

    def _noted(self, failure: FabricError) -> FabricError:
        self.is_superseded |= failure.reason is Reason.SUPERSEDED
        return failure

    async def responses(self) -> AsyncIterator[session_pb2.ConverseResponse]:
        """Yield the responses, up to and including `closed`."""
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
        """Half-close the call, which ends the session. The last responses can still be read."""
        with contextlib.suppress(*_ENDED):
            await self._call.done_writing()

    def cancel(self) -> None:
        """End the call immediately, without the worker. A read that waits is cancelled."""
        self._call.cancel()

    async def finish(self) -> None:
        """Half-close the call; cancel it if the worker does not end it within a short time."""
        if self._call.done():  # grpc.aio raises CancelledError from a read of a cancelled call
            return
        try:
            with contextlib.suppress(*_ENDED, TimeoutError):
                async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                    await self._call.done_writing()
                    while await self._call.read() is not grpc.aio.EOF:
                        pass
        finally:
            self._call.cancel()
