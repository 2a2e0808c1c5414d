"""Runs a chat session: acquires a slot for each turn, calls the worker and releases the slot."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from duplane.edge.session.chat_session import ChatSession
from duplane.edge.session.effects import (
    AnswerBegan,
    CountSegment,
    CountUnheard,
    Effect,
    StopTurn,
)
from duplane.edge.session.runner import SessionRunner
from duplane.fabric.durations import to_seconds
from duplane.fabric.errors import FabricError
from duplane.fabric.model import ModelFormat, name_of
from duplane.fabric.v1 import lease_pb2, session_pb2

T = TypeVar("T")


class ChatRunner(SessionRunner[ChatSession]):
    """Runs one chat session for one client."""

    _lease_count = 0
    _ticket_id = ""
    _ticket_proof = b""
    _is_releasing = False
    _work: asyncio.Future[Any] | None = None  # what acquires a slot or runs a turn

    async def _exchange(self, request: lease_pb2.AcquireLeaseRequest) -> None:
        granted: lease_pb2.Granted | None = None
        try:
            while self.session.closed is None:
                if granted is not None and not self.session.has_slot:
                    granted = await self._release(granted)
                elif granted is not None and (turn := self.session.next_turn(self._clock.now())):
                    await self._unless_stopped(self._run_turn(granted, turn))
                    del turn  # with its media, for which the session may have no use any more
                    granted = await self._release(granted)
                elif granted is None and self.session.needs_slot:
                    granted = await self._unless_stopped(self._acquire(request))
                else:
                    self._wake.clear()
                    await self._wake.wait()
        finally:
            if granted is not None:
                await self._release(granted)

    async def _unless_stopped(self, work: Coroutine[None, None, T]) -> T | None:
        """Return the result of `work`; None if the session has stopped its turn meanwhile."""
        self._work = asyncio.ensure_future(work)
        try:
            return await self._work
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():  # the session is over
                raise
            return None
        finally:
            self._work = None

    def _execute(self, effect: Effect) -> None:
        match effect:
            case StopTurn():
                if self._work:
                    self._work.cancel()
            case CountSegment(is_too_short):
                self._metrics.segment_ended(is_too_short=is_too_short)
            case CountUnheard():
                self._metrics.unheard.inc()
            case AnswerBegan(delay_s):
                self._metrics.answer_delays.observe(delay_s)
            case _:
                super()._execute(effect)

    async def _acquire(
        self, first_request: lease_pb2.AcquireLeaseRequest
    ) -> lease_pb2.Granted | None:
        self._lease_count += 1
        request = lease_pb2.AcquireLeaseRequest()
        request.CopyFrom(first_request)
        request.request_id = f"{first_request.request_id}/{self._lease_count}"
        if model := self.session.asked_model:
            request.model = model
        if self.session.is_retrying:
            request.ticket_id, request.ticket_proof = self._ticket_id, self._ticket_proof
            request.was_granted = bool(self._ticket_id)
        try:
            granted = await self._fabric.acquire(request, self._on_queued)
        except FabricError as error:
            self._failed(error)
            return None
        self._ticket_id, self._ticket_proof = granted.ticket_id, granted.ticket_proof
        self._on_granted(granted)
        self._note_claim(granted)
        now, has_limit = self._clock.now(), granted.HasField("claim_timeout")
        claim_s = to_seconds(granted.claim_timeout) if has_limit else None
        model = ModelFormat.of(granted.model)
        self._apply(self.session.granted(claim_s, now, model, name_of(granted)), now)
        return granted

    async def _run_turn(self, granted: lease_pb2.Granted, turn: session_pb2.ChatRequest) -> None:
        session = self.session
        if self._spans.context is not None:
            turn.trace.CopyFrom(self._spans.context)
        try:
            if session.must_convert:  # two minutes of sound take 50 ms
                turn = await asyncio.to_thread(session.convert, turn)
            async with self._fabric.chat(granted, turn) as responses:
                async for response in responses:
                    now = self._clock.now()
                    self._apply(self.session.responded(response, now), now)
                    if not self.session.is_running and response.WhichOneof("event") != "done":
                        return  # the turn is over for the session; this `return` ends the call
        except FabricError as error:
            self._failed(error)
        else:
            now = self._clock.now()
            self._apply(self.session.call_ended(now), now)

    async def _release(self, granted: lease_pb2.Granted) -> None:
        self._is_releasing = True
        await self._fabric.release(granted.lease_id)
        self._is_releasing = False

    async def _stop_exchange(self, exchanging: asyncio.Task[None]) -> None:
        """Stop the running turn immediately, since nobody reads its answer.

        If a slot is being released, finish the release first.
        """
        if self._is_releasing:
            await asyncio.wait({exchanging}, timeout=self._limits.end_s)
        exchanging.cancel()
