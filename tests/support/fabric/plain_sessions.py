"""What workers with a scripted `Converse` share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc

from duplane.fabric.v1 import session_pb2, session_pb2_grpc


class PlainSessions(session_pb2_grpc.SessionServiceServicer):
    """A worker's servicer whose chats end at once, and which keeps no copies of sessions."""

    async def Chat(  # pyright: ignore[reportIncompatibleMethodOverride]  # stubs: no async
        self, request: session_pb2.ChatRequest, context: Any
    ) -> AsyncIterator[session_pb2.ChatResponse]:
        yield session_pb2.ChatResponse(done=session_pb2.Done())

    async def TakeOver(  # pyright: ignore[reportIncompatibleMethodOverride]  # stubs: no async
        self, requests: object, context: Any
    ) -> AsyncIterator[session_pb2.TakeOverResponse]:
        await context.abort(grpc.StatusCode.NOT_FOUND)
        yield session_pb2.TakeOverResponse()
