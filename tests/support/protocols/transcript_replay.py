"""Two ways to replay a transcript: through the pure session, and through a live edge."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import orjson
import pybase64
import pytest
from support.edge.live_edge import HandSetClock, LiveEdge
from support.edge.scripted_fabric import Acquisition, ScriptedConversation, ScriptedTurn
from support.protocols.transcripts import (
    Matcher,
    Step,
    Transcript,
    chat_response_of,
    error_of,
    json_of,
    message_of,
    response_of,
)
from support.time_limits import WITHIN_S
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from duplane.edge.clock import Moment
from duplane.edge.close import Close, CloseReason
from duplane.edge.dialects.d import REQUEST
from duplane.edge.dialects.dialect import Dialect, Phase
from duplane.edge.identity import Identity
from duplane.edge.modes import DEFAULT_MODE, MODES
from duplane.edge.routing import (
    ENDPOINTS,
    OPENAI_ROUTES,
    REFUSAL_DIALECTS,
    Endpoint,
    max_message_bytes,
    parse_target,
    unsupported_mode,
)
from duplane.edge.session.chat_session import ChatSession
from duplane.edge.session.continuity import Continuity, RebuildPermits
from duplane.edge.session.duplex_session import DuplexSession
from duplane.edge.session.effects import RequestPermit, ReturnPermit
from duplane.edge.session.move_table import MOVING
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.journal import JournalSpace
from duplane.fabric.v1 import lease_pb2, session_pb2

IDENTITY = Identity("sess_0123456789ab", "rt_1714200000000")
RECORDED = replace(IDENTITY, recording_id=IDENTITY.session_id)
WALL_NS = 1_714_200_000_000_000_000


@dataclass(frozen=True)
class Move:
    """The result of one line of a transcript."""

    step: Step
    dialect: type[Dialect]  # the dialect after the line
    before: Phase
    after: Phase
    kind: str | None  # name of the client's event in the tables of the dialect
    told: tuple[Any, ...]


def is_too_big(transcript: Transcript, message: bytes) -> bool:
    """Return whether a message exceeds the size limit for the transcript's kind of session."""
    bound = max_message_bytes(parse_target(transcript.path, {}), transcript.limits)
    return len(message) > bound


class PureReplay:
    """Replays a transcript through the pure session, without event loop, sockets or real time."""

    def __init__(self, transcript: Transcript) -> None:
        self.transcript = transcript
        self.now = Moment(36_077.123, WALL_NS)
        self.events: deque[Any] = deque()
        self.turns: deque[session_pb2.ChatRequest] = deque()
        self.requests: deque[session_pb2.ConverseRequest] = deque()
        self.moves: list[Move] = []
        self._told: list[Any] = []
        self._kind: str | None = None
        self._matcher = Matcher()
        entry = parse_target(transcript.path, {})
        identity = RECORDED if transcript.is_recorded else IDENTITY
        identity = replace(identity, model=entry.model, url_id=entry.url_id)
        journals = JournalSpace(2**20, 2**20) if transcript.can_move else None
        continuity = Continuity(journals, RebuildPermits(1), new_seed=lambda: 7)
        endpoint = ENDPOINTS.get((entry.route, entry.mode))
        if endpoint is None:
            endpoint = Endpoint(REFUSAL_DIALECTS[entry.route], MODES[DEFAULT_MODE])
            self.session = endpoint.new_session(identity, transcript.limits, self.now)
            self._tell(self.session.end(unsupported_mode(entry.mode), self.now))
            self._moved(Step(0, "connects", "", transcript.path), Phase.START)
        else:
            self.session = endpoint.new_session(identity, transcript.limits, self.now, continuity)
            before = self.session.dialect.phase
            self._tell(self.session.connected(self.now))
            self._moved(Step(0, "connects", "", transcript.path), before)

    def run(self) -> None:
        for step in self.transcript.steps:
            before, self._kind = self.session.dialect.phase, None
            getattr(self, f"_{step.who}")(step)
            if self.session.time_limits.next_deadline <= self.now.monotonic_s:
                self._tell(self.session.expire(self.now))
            if isinstance(self.session, ChatSession):
                turn = self.session.next_turn(self.now)
                self.turns.extend([turn] if turn else [])
            else:
                self._take_requests(self.session)
            self._moved(step, before)
        assert not self.events, f"not in the transcript: {self.events}"
        assert not self.turns, f"not in the transcript: {self.turns}"
        assert not self.requests, f"not in the transcript: {self.requests}"

    def _take_requests(self, session: DuplexSession) -> None:
        moves = session.moves
        while effects := session.effects:
            match effects.popleft():
                case RequestPermit(permits, slot):
                    permits.request(slot, functools.partial(moves.permitted, slot))
                case ReturnPermit(permits, slot):
                    permits.give_back(slot)
                case _:
                    pass
        for slot in (moves.present, moves.attempt.slot):
            while outgoing := session.take(self.now, slot):
                self.requests.append(outgoing.request)

    def _moved(self, step: Step, before: Phase) -> None:
        dialect = self.session.dialect
        told, self._told = tuple(self._told), []
        self.moves.append(Move(step, type(dialect), before, dialect.phase, self._kind, told))

    def _tell(self, events: list[bytes]) -> None:
        told = [orjson.loads(event) for event in events]
        self._told += told
        self.events.extend(told)

    def _client(self, step: Step) -> None:
        event = self._matcher.filled(json_of(step.rest))
        self._receive(orjson.dumps(event))
        if isinstance(event, dict):
            kind = event.get("type") if self.session.dialect.name != "D" else REQUEST
            self._kind = kind if isinstance(kind, str) else None

    def _late(self, step: Step) -> None:
        assert self.session.closed, f"line {step.line}: the session goes on"
        self._client(step)
        assert not self._told, f"line {step.line}: a session that is over says {self._told}"

    def _receive(self, message: bytes) -> None:
        if is_too_big(self.transcript, message):
            self._tell(self.session.end(Close(CloseReason.TOO_BIG), self.now))
        else:
            self._tell(self.session.receive(message, self.now))
        if isinstance(self.session, ChatSession) and self.session.successor:
            self.session = self.session.successor

    def _frame(self, step: Step) -> None:
        self._receive(step.rest.encode())

    def _bytes(self, step: Step) -> None:
        self._receive(pybase64.b64decode(step.rest))

    def _binary(self, step: Step) -> None:
        self._tell(self.session.end(Close(CloseReason.UNREADABLE), self.now))

    def _leaves(self, step: Step) -> None:
        self._tell(self.session.end(Close(CloseReason.GONE), self.now))

    def _drain(self, step: Step) -> None:
        self._tell(self.session.end(Close(CloseReason.SHUTDOWN), self.now))

    def _server(self, step: Step) -> None:
        assert self.events, f"line {step.line}: nothing was said"
        self._matcher.match(step, self.events.popleft())

    def _scheduler(self, step: Step) -> None:
        match step.what:
            case "queued":
                self._tell(self.session.queued(message_of(step.rest, lease_pb2.Queued()), self.now))
            case "granted":
                if isinstance(self.session, ChatSession):
                    assert self.session.needs_slot, f"line {step.line}: not asked for"
                    self._tell(self.session.granted(2.0, self.now, model_name=step.rest))
                else:
                    self._tell(self._claimed(self.session, step.rest))
            case _:
                error = FabricError(Reason(step.rest), "scripted")
                self._tell(self.session.failed(error, self.now))

    def _claimed(self, session: DuplexSession, model_label: str) -> list[bytes]:
        moves = session.moves
        slot = moves.attempt.slot if moves.phase in MOVING else moves.present
        granted = lease_pb2.Granted(worker_id="w", model_label=model_label)
        return session.claimed(slot, granted, 60.0, self.now)

    def _edge(self, step: Step) -> None:
        if step.what == "chat":
            assert self.turns, f"line {step.line}: the worker was asked nothing"
            self._matcher.match_turn(step, self.turns.popleft())
            return
        assert self.requests, f"line {step.line}: the worker was told nothing"
        self._matcher.match_request(step, self.requests.popleft())

    def _worker(self, step: Step) -> None:
        if step.what == "breaks":
            self._tell(self.session.failed(error_of(step), self.now))
            return
        is_chat = isinstance(self.session, ChatSession)
        assert (step.what in ("prefilled", "piece", "done")) is is_chat, "another kind of session"
        if isinstance(self.session, ChatSession):
            self._tell(self.session.responded(chat_response_of(step), self.now))
        else:
            moves = self.session.moves
            slot = moves.attempt.slot if moves.phase in MOVING else moves.present
            self._tell(self.session.responded(response_of(step), self.now, slot))

    def _clock(self, step: Step) -> None:
        later = float(step.rest)
        self.now = Moment(self.now.monotonic_s + later, self.now.wall_ns + int(later * 1e9))

    def _ends(self, step: Step) -> None:
        assert self.session.closed, f"line {step.line}: the session goes on"
        assert self.session.close_code == int(step.rest)


class LiveReplay:
    """Replays a transcript with a real client, a live edge and a scripted fabric."""

    def __init__(self, transcript: Transcript, edge: LiveEdge) -> None:
        assert isinstance(edge.clock, HandSetClock)
        self.transcript = transcript
        self._clock_hand = edge.clock
        self._edge_process = edge
        self._fabric = edge.fabric
        self._fabric.is_automatic = False
        self._matcher = Matcher()
        self._acquisition: Acquisition | None = None
        self._conversation: ScriptedConversation | None = None
        self._turn: ScriptedTurn | None = None
        # Clients of E and L are not told of their slot, so the transcript has no event to wait for.
        route = parse_target(transcript.path, {}).route
        self._silent = REFUSAL_DIALECTS[route].name if route in OPENAI_ROUTES else ""

    async def run(self) -> None:
        async with self._edge_process.connect_to(self.transcript.path) as client:
            for step in self.transcript.steps:
                await getattr(self, f"_{step.who}")(step, client)
        await self._edge_process.settled()

    async def _client(self, step: Step, client: ClientConnection) -> None:
        message = orjson.dumps(self._matcher.filled(json_of(step.rest)))
        # The edge may close the connection while the client still sends.
        is_cut_short = is_too_big(self.transcript, message)
        with contextlib.suppress(ConnectionClosed) if is_cut_short else contextlib.nullcontext():
            await client.send(message, text=True)

    async def _late(self, step: Step, client: ClientConnection) -> None:
        with contextlib.suppress(ConnectionClosed):  # the connection may be closed
            await self._client(step, client)

    async def _frame(self, step: Step, client: ClientConnection) -> None:
        await client.send(step.rest)

    async def _bytes(self, step: Step, client: ClientConnection) -> None:
        await client.send(pybase64.b64decode(step.rest), text=True)

    async def _binary(self, step: Step, client: ClientConnection) -> None:
        await client.send(b"\0\1\2")

    async def _leaves(self, step: Step, client: ClientConnection) -> None:
        client.transport.abort()

    async def _drain(self, step: Step, client: ClientConnection) -> None:
        self._edge_process.drain()

    async def _server(self, step: Step, client: ClientConnection) -> None:
        async with asyncio.timeout(WITHIN_S):
            event = orjson.loads(await client.recv())
            self._matcher.match(step, event)
            if self._silent == "E" and event["type"] == "response.done" and self._acquisition:
                await self._acquisition.is_over.wait()  # it has left the queue

    async def _scheduler(self, step: Step, client: ClientConnection) -> None:
        if self._acquisition is None or self._acquisition.is_over.is_set():
            self._acquisition = await self._fabric.acquisition()
        match step.what:
            case "queued":
                self._acquisition.queued(message_of(step.rest, lease_pb2.Queued()))
            case "granted":
                self._acquisition.model_label = step.rest
                self._acquisition.grant()
                if self._acquisition.request.kind == lease_pb2.SESSION_KIND_CHAT:
                    async with asyncio.timeout(WITHIN_S):
                        await self._acquisition.is_over.wait()
                    return
                self._turn = None
                self._conversation = await self._fabric.conversation()
                if self._silent:
                    await self._edge_process.until_running(self._silent)
            case _:
                self._acquisition.refuse(Reason(step.rest))

    async def _edge(self, step: Step, client: ClientConnection) -> None:
        if step.what == "chat":
            self._turn = await self._fabric.turn()
            self._matcher.match_turn(step, self._turn.request)
            return
        assert self._conversation
        self._matcher.match_request(step, await self._conversation.next_request())

    async def _worker(self, step: Step, client: ClientConnection) -> None:
        speaking = self._turn or self._conversation
        assert speaking
        if step.what == "breaks":
            error = error_of(step)
            speaking.fail(error.reason, error.field, error.message)
        elif self._turn:
            self._turn.say(chat_response_of(step))
        elif self._conversation:
            self._conversation.say(response_of(step))

    async def _clock(self, step: Step, client: ClientConnection) -> None:
        # Except in E, the session begins with its request for a lease.
        if self._acquisition is None and self._silent != "E":
            self._acquisition = await self._fabric.acquisition()
        async with asyncio.timeout(WITHIN_S):
            await (await client.ping())  # the edge has applied all messages before
        self._clock_hand.advance(float(step.rest))

    async def _ends(self, step: Step, client: ClientConnection) -> None:
        async with asyncio.timeout(WITHIN_S):
            await client.wait_closed()
        with pytest.raises(ConnectionClosed):
            await client.recv()  # no other message may arrive
        if not any(other.who == "leaves" for other in self.transcript.steps):
            assert client.close_code == int(step.rest)
        if self._conversation:
            async with asyncio.timeout(WITHIN_S):
                await self._conversation.is_over.wait()
            assert self._conversation.received.empty(), "the worker was told more than is written"
