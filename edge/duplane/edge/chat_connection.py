"""One WebSocket connection that chats: acquires a slot for each turn and gives it back."""

from __future__ import annotations

import asyncio

from duplane.edge.chat_session import ChatSession
from duplane.edge.clock import Clock
from duplane.edge.connection import Connection, Socket
from duplane.edge.settings import Limits
from duplane.edge.spans import SessionSpans
from duplane.fabric.client import FabricClient
from duplane.fabric.errors import FabricError
from duplane.fabric.v1 import lease_pb2, session_pb2


class ChatConnection(Connection):
    """Runs one chat on one socket."""

    def __init__(
        self,
        socket: Socket,
        session: ChatSession,
        limits: Limits,
        fabric: FabricClient,
        spans: SessionSpans,
        clock: Clock,
    ) -> None:
        super().__init__(socket, session, limits, fabric, spans, clock)
        self._chat = session
        self._wish_count = 0
        self._ticket_id = ""
        self._is_giving_back = False

    async def _converse(self, wish: lease_pb2.AcquireLeaseRequest) -> None:
        granted: lease_pb2.Granted | None = None
        try:
            while self._chat.farewell is None:
                if granted is not None and not self._chat.has_slot:
                    granted = await self._give_back(granted)
                elif granted is not None and (turn := self._chat.next_turn(self._clock.now())):
                    await self._run_turn(granted, turn)
                    granted = await self._give_back(granted)
                elif granted is None and self._chat.wants_slot:
                    granted = await self._acquire(wish)
                else:
                    self._wake.clear()
                    await self._wake.wait()
        finally:
            if granted is not None:
                await self._give_back(granted)

    async def _acquire(self, wish: lease_pb2.AcquireLeaseRequest) -> lease_pb2.Granted | None:
        self._wish_count += 1
        request = lease_pb2.AcquireLeaseRequest()
        request.CopyFrom(wish)
        request.request_id = f"{wish.request_id}/{self._wish_count}"
        if self._chat.is_retrying:
            request.ticket_id = self._ticket_id
        try:
            granted = await self._fabric.acquire(request, self._on_queued)
        except FabricError as error:
            self._apply(self._chat.lost(error, self._clock.now()))
            return None
        self._ticket_id = granted.ticket_id
        self._spans.granted(granted.lease_id)
        if self.recording:
            self.recording.worker = granted.worker_address
        claim_s = granted.claim_timeout.ToTimedelta().total_seconds()
        self._apply(self._chat.granted(claim_s, self._clock.now()))
        return granted

    async def _run_turn(self, granted: lease_pb2.Granted, turn: session_pb2.ChatRequest) -> None:
        if self._spans.context is not None:
            turn.trace.CopyFrom(self._spans.context)
        try:
            async with self._fabric.chat(granted, turn) as responses:
                async for response in responses:
                    self._apply(self._chat.told(response, self._clock.now()))
                    if not self._chat.is_running and response.WhichOneof("event") != "done":
                        return  # given up here: leaving stops it there
        except FabricError as error:
            self._apply(self._chat.lost(error, self._clock.now()))
        else:
            self._apply(self._chat.cut_off(self._clock.now()))

    async def _give_back(self, granted: lease_pb2.Granted) -> None:
        self._is_giving_back = True
        await self._fabric.release(granted.lease_id)
        self._is_giving_back = False

    async def _let_go(self, conversing: asyncio.Task[None]) -> None:
        """Stop the turn at once: nobody reads it. A slot that is going back goes back."""
        if self._is_giving_back:
            await asyncio.wait({conversing}, timeout=self._limits.end_s)
        conversing.cancel()
