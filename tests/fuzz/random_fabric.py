"""A fabric that serves good clients (witnesses) correctly, and all others at random with faults."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from random import Random
from typing import Any

from support.edge.scripted_fabric import (
    Acquisition,
    ScriptedConversation,
    ScriptedFabric,
    ScriptedTurn,
    answered,
    listened,
)
from support.protocols.transcripts import pcm

from duplane.fabric.errors import Reason
from duplane.fabric.v1 import lease_pb2, session_pb2

WITNESS = "witness"
_OPENED = session_pb2.Opened(prompt_token_count=7, context_token_limit=8192)
_CLOSE_REASONS: list[Any] = session_pb2.CloseReason.values()
_LATE_S = 0.02
# UNAVAILABLE is left out: no live scheduler answers it, and the edge would retry without end.
_REFUSALS = [reason for reason in Reason if reason is not Reason.UNAVAILABLE]


class RandomFabric:
    """Answers the calls to a `ScriptedFabric`."""

    def __init__(self, fabric: ScriptedFabric, rng: Random) -> None:
        fabric.is_automatic = False
        self._fabric = fabric
        self._rng = rng
        self._kind: set[bytes] = set()  # request ids in the claims of witnesses
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Serve until cancelled."""
        try:
            await asyncio.gather(
                self._serve(self._fabric.acquisitions, self._acquisition),
                self._serve(self._fabric.conversations, self._conversation),
                self._serve(self._fabric.turns, self._turn),
            )
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, calls: asyncio.Queue[Any], serve: Any) -> None:
        while True:
            self._start(serve(await calls.get()))

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _late(self) -> None:
        if self._rng.random() < 0.2:
            await asyncio.sleep(self._rng.random() * _LATE_S)

    async def _acquisition(self, call: Acquisition) -> None:
        if call.request.client_id == WITNESS:
            self._kind.add(call.request.request_id.encode())
            call.grant()
            return
        await self._late()
        for position in range(self._rng.choice((0, 0, 0, 1, 3)), 0, -1):
            call.queued(lease_pb2.Queued(ticket_id="q_1", position=position, queue_length=3))
            await self._late()
        chance = self._rng.random()
        if chance < 0.1:
            call.refuse(self._rng.choice(_REFUSALS))
        elif chance < 0.95:
            call.grant()

    async def _conversation(self, call: ScriptedConversation) -> None:
        is_kind = call.claim.lease.claims in self._kind
        reading = asyncio.create_task(self._converse(call, is_kind))
        await call.is_over.wait()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)

    async def _converse(self, call: ScriptedConversation, is_kind: bool) -> None:
        while True:
            request = await call.received.get()
            kind = request.WhichOneof("message")
            if kind == "open" and (is_kind or self._rng.random() < 0.95):
                call.say(session_pb2.ConverseResponse(opened=_OPENED))
            elif kind == "unit" and is_kind:
                call.say(*listened(request.unit))
            elif kind == "unit":
                await self._late()
                self._answer_unit(call, request.unit)

    def _answer_unit(self, call: ScriptedConversation, unit: session_pb2.Unit) -> None:
        response = session_pb2.ConverseResponse()
        match self._rng.randrange(12):
            case 0:
                response.failed.sequence = unit.sequence
                response.failed.reason = self._rng.choice(["PAUSED", "INVALID_FIELD", "OTHER"])
            case 1:
                return  # drop the unit without an answer
            case 2 if self._rng.random() < 0.5:
                call.fail(self._rng.choice(list(Reason)))
                return
            case 3 if self._rng.random() < 0.5:
                response.closed.reason = self._rng.choice(_CLOSE_REASONS)
            case 4 | 5 | 6:
                response.delta.sequence = unit.sequence
                response.delta.speech.text = self._rng.choice(["", "Hi", "é" * 500])
                response.delta.speech.audio = pcm(self._rng.choice([0, 1, 2400, 24_000]))
                response.delta.end_of_turn = self._rng.random() < 0.3
                response.delta.dropped_unit_count = self._rng.choice((0, 0, 1))
            case _:
                (response,) = listened(unit)
        call.say(response)

    async def _turn(self, call: ScriptedTurn) -> None:
        if call.request.lease.claims in self._kind:
            call.say(*answered(call.request))
            return
        responses = answered(call.request)
        for response in responses[: self._rng.choice((0, 1, 2, 4, 4, 4, 4, 4))]:
            await self._late()
            call.say(response)
        if self._rng.random() < 0.3:
            call.fail(self._rng.choice(list(Reason)))
