"""A call of AdminService.Watch: the state of a fabric, then each change."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence

import grpc.aio

from duplane.fabric.channel_pool import ChannelPool
from duplane.fabric.errors import FabricError, Reason, from_rpc
from duplane.fabric.v1 import admin_pb2, admin_pb2_grpc

FIRST_ANSWER_S = 3.0  # for the first message of a scheduler; then the next scheduler is called


class WatchStream:
    """The reader's side of one Watch call, which has begun."""

    def __init__(
        self,
        call: grpc.aio.UnaryStreamCall[admin_pb2.WatchRequest, admin_pb2.WatchResponse],
    ) -> None:
        self._call = call
        self._first: admin_pb2.WatchResponse | None = None

    async def begin(self) -> None:
        """Wait for the first message. Raises FabricError."""
        try:
            async with asyncio.timeout(FIRST_ANSWER_S):
                self._first = await self._read()
        except TimeoutError:
            raise FabricError(Reason.UNAVAILABLE, "the scheduler does not answer") from None

    async def read(self) -> admin_pb2.WatchResponse:
        """Return the next message. Raises FabricError when the call has ended."""
        first, self._first = self._first, None
        return first or await self._read()

    async def _read(self) -> admin_pb2.WatchResponse:
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error) from None
        if isinstance(message, admin_pb2.WatchResponse):
            return message
        raise FabricError(Reason.UNAVAILABLE, "the scheduler has ended the watch")


@contextlib.asynccontextmanager
async def watching(channels: ChannelPool, schedulers: Sequence[str]) -> AsyncGenerator[WatchStream]:
    """Yield a call that has begun, at the first of the schedulers that answers.

    Raises FabricError if none answers, or if one refuses.
    """
    failure = FabricError(Reason.UNAVAILABLE, "no scheduler answers")
    for scheduler in schedulers:
        async with channels.use(scheduler) as channel:
            call = admin_pb2_grpc.AdminServiceStub(channel).Watch(admin_pb2.WatchRequest())
            try:
                stream = WatchStream(call)
                try:
                    await stream.begin()
                except FabricError as error:
                    failure = error
                    continue
                yield stream
                return
            finally:
                call.cancel()
    raise failure
