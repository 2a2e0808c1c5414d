"""Taking a session from a worker: what the caller believes before the worker's last word."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import grpc.aio
import pytest
from support.fabric.plain_sessions import PlainSessions

from duplane.fabric.attaching import SessionTaker
from duplane.fabric.channel_pool import ChannelPool
from duplane.fabric.errors import FabricError, Reason, abort
from duplane.fabric.v1 import session_pb2, session_pb2_grpc


class Worker(PlainSessions):
    """Sends the whole copy of a session; ends with an error if another edge had it first."""

    def __init__(self, *, is_too_late: bool) -> None:
        self.is_too_late = is_too_late

    async def Converse(  # pyright: ignore[reportIncompatibleMethodOverride]  # stubs: no async
        self, requests: object, context: Any
    ) -> AsyncIterator[session_pb2.ConverseResponse]:
        await abort(context, FabricError(Reason.OUT_OF_ORDER, "not called"))
        yield session_pb2.ConverseResponse()

    async def TakeOver(
        self, request: session_pb2.TakeOverRequest, context: Any
    ) -> AsyncIterator[session_pb2.TakeOverResponse]:
        yield session_pb2.TakeOverResponse(attached=session_pb2.Attached(last_sequence=3))
        yield session_pb2.TakeOverResponse(kept=session_pb2.Kept(is_last=True))
        if self.is_too_late:
            await abort(context, FabricError(Reason.SUPERSEDED, "another edge has the session"))


@contextlib.asynccontextmanager
async def running(worker: Worker) -> AsyncGenerator[str]:
    server = grpc.aio.server()
    session_pb2_grpc.add_SessionServiceServicer_to_server(worker, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def take(address: str) -> session_pb2.Attached:
    attach = session_pb2.Attach(session_id="s", token_secret="x")
    pool = ChannelPool()
    try:
        async with SessionTaker(pool).taken(attach, [], [address]) as taken:
            return taken.attached
    finally:
        await pool.close()


async def test_whole_copy_is_taken() -> None:
    async with running(Worker(is_too_late=False)) as address:
        assert (await take(address)).last_sequence == 3


async def test_copy_that_another_edge_got_first_is_not_taken() -> None:
    async with running(Worker(is_too_late=True)) as address:
        with pytest.raises(FabricError) as failure:
            await take(address)
    assert failure.value.reason is Reason.SUPERSEDED
