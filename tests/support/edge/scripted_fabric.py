"""A scheduler and a worker whose responses a test can script. They use real gRPC, but no model.

By default the scheduler grants free slots, and the worker immediately opens conversations and
answers each unit with `listen`. A test that scripts the responses sets `is_automatic` to False.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Generic, TypeVar

import grpc.aio
from google.protobuf.duration_pb2 import Duration
from support.time_limits import WITHIN_S

from duplane.fabric.errors import FabricError, Reason, abort
from duplane.fabric.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    lease_pb2,
    lease_pb2_grpc,
    model_pb2,
    registry_pb2,
    session_pb2,
    session_pb2_grpc,
)

Response = TypeVar("Response")
_CLAIM_S = 2
# duplane's servers have the same options, because waiting clients send pings without data.
_OPTIONS = [
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
]


def listened(unit: session_pb2.Unit) -> list[session_pb2.ConverseResponse]:
    """Return the `listen` response to a unit."""
    delta = session_pb2.Delta(
        sequence=unit.sequence,
        listen=session_pb2.Listen(),
        context_token_count=100 + unit.sequence,
        state_change=session_pb2.StateChange(),
    )
    return [session_pb2.ConverseResponse(delta=delta)]


def answered(request: session_pb2.ChatRequest) -> list[session_pb2.ChatResponse]:
    """Return a chat answer of two words, each with sound if the request demands audio."""
    sound = bytes(4 * 240) if request.config.generate_audio else b""
    return [
        session_pb2.ChatResponse(prefilled=session_pb2.Prefilled(prompt_token_count=9)),
        *(
            session_pb2.ChatResponse(
                delta=session_pb2.ChatDelta(sequence=n, text=word, audio=sound)
            )
            for n, word in enumerate(("Hello", " there."))
        ),
        session_pb2.ChatResponse(
            done=session_pb2.Done(
                reason=session_pb2.FINISH_REASON_STOP,
                token_counts=session_pb2.TokenCounts(
                    input_text_token_count=9, output_text_token_count=3
                ),
            )
        ),
    ]


class Acquisition:
    """One waiting AcquireLease call."""

    def __init__(self, request: lease_pb2.AcquireLeaseRequest) -> None:
        self.request = request
        self.model_label = ""
        self.is_over = asyncio.Event()
        self.events: asyncio.Queue[lease_pb2.Queued | FabricError | None] = asyncio.Queue()

    def queued(self, queued: lease_pb2.Queued) -> None:
        self.events.put_nowait(queued)

    def refuse(self, reason: Reason, field: str = "") -> None:
        self.events.put_nowait(FabricError(reason, "scripted", field=field))

    def grant(self) -> None:
        self.events.put_nowait(None)


class ScriptedCall(Generic[Response]):
    """A call to the worker. The test makes its responses."""

    def __init__(self) -> None:
        self.responses: asyncio.Queue[Response | FabricError] = asyncio.Queue()
        self.is_over = asyncio.Event()

    def say(self, *responses: Response) -> None:
        for response in responses:
            self.responses.put_nowait(response)

    def fail(self, reason: Reason, field: str = "", message: str = "scripted") -> None:
        self.responses.put_nowait(FabricError(reason, message, field=field))


class ScriptedConversation(ScriptedCall[session_pb2.ConverseResponse]):
    """One Converse call with a claimed slot."""

    def __init__(self, claim: session_pb2.Claim) -> None:
        super().__init__()
        self.claim = claim
        self.received: asyncio.Queue[session_pb2.ConverseRequest] = asyncio.Queue()

    async def next_request(self) -> session_pb2.ConverseRequest:
        return await asyncio.wait_for(self.received.get(), WITHIN_S)


class ScriptedTurn(ScriptedCall[session_pb2.ChatResponse]):
    """One Chat call."""

    def __init__(self, request: session_pb2.ChatRequest) -> None:
        super().__init__()
        self.request = request


class ScriptedFabric:
    """The servers of the scheduler and the worker, and their state."""

    def __init__(self, slot_count: int) -> None:
        self.scheduler = ""
        self.worker = ""
        self.is_automatic = True
        self.model_digest = ""  # the worker cannot rebuild conversations
        self.model: model_pb2.Model | None = None  # None as from a scheduler of an older release
        self.on_unit: Callable[[session_pb2.Unit], Sequence[session_pb2.ConverseResponse]] = (
            listened
        )
        self.on_turn = answered
        self.turns: asyncio.Queue[ScriptedTurn] = asyncio.Queue()
        self.acquisitions: asyncio.Queue[Acquisition] = asyncio.Queue()
        self.conversations: asyncio.Queue[ScriptedConversation] = asyncio.Queue()
        self.free_slots = set(range(slot_count))
        self.slot_count = slot_count
        self.leases: dict[str, int] = {}
        self.claimed: set[str] = set()
        self.given_up: set[str] = set()  # lease ids that ReleaseLease calls have named
        self.waiting: list[Acquisition] = []
        self.streams: set[ScriptedConversation | ScriptedTurn] = set()
        self.changed = asyncio.Condition()
        self.scheduler_server = grpc.aio.server(options=_OPTIONS)
        self.worker_server = grpc.aio.server(options=_OPTIONS)

    @classmethod
    @contextlib.asynccontextmanager
    async def running(cls, slot_count: int = 1) -> AsyncGenerator[ScriptedFabric]:
        fabric = cls(slot_count)
        # Servicers that implement only the calls that an edge makes.
        leases: Any = _Leases(fabric)
        admin: Any = _Admin(fabric)
        sessions: Any = _Sessions(fabric)
        lease_pb2_grpc.add_LeaseServiceServicer_to_server(leases, fabric.scheduler_server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, fabric.scheduler_server)
        session_pb2_grpc.add_SessionServiceServicer_to_server(sessions, fabric.worker_server)
        fabric.scheduler = await _start(fabric.scheduler_server)
        fabric.worker = await _start(fabric.worker_server)
        try:
            yield fabric
        finally:
            await fabric.worker_server.stop(0)
            await fabric.scheduler_server.stop(0)

    async def acquisition(self) -> Acquisition:
        """Return the next AcquireLease call."""
        return await asyncio.wait_for(self.acquisitions.get(), WITHIN_S)

    async def conversation(self) -> ScriptedConversation:
        """Return the next claimed conversation."""
        return await asyncio.wait_for(self.conversations.get(), WITHIN_S)

    async def turn(self) -> ScriptedTurn:
        """Return the next turn of chat."""
        return await asyncio.wait_for(self.turns.get(), WITHIN_S)

    async def settled(self) -> None:
        """Wait until no request waits, no stream is open and every slot is free."""
        async with asyncio.timeout(WITHIN_S), self.changed:
            await self.changed.wait_for(
                lambda: (
                    not (self.waiting or self.streams or self.leases)
                    and len(self.free_slots) == self.slot_count
                )
            )

    def expire_unclaimed(self, lease_id: str) -> None:
        """Free the slot of a lease that was not claimed, as a scheduler does."""
        if lease_id in self.leases and lease_id not in self.claimed:
            self._expiring = asyncio.ensure_future(self.give_back(lease_id))

    async def give_back(self, lease_id: str) -> None:
        async with self.changed:
            slot = self.leases.pop(lease_id, None)
            if slot is not None:
                self.free_slots.add(slot)
            self.changed.notify_all()


async def _start(server: grpc.aio.Server) -> str:
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return f"127.0.0.1:{port}"


class _Uncalled:
    """Base of a servicer that implements only some calls; all others fail as UNIMPLEMENTED."""

    def __getattr__(self, name: str) -> Any:
        async def refuse(request: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, name)

        return refuse


class _Leases:
    def __init__(self, fabric: ScriptedFabric) -> None:
        self._fabric = fabric

    async def AcquireLease(self, request, context):
        fabric = self._fabric
        acquisition = Acquisition(request)
        fabric.waiting.append(acquisition)
        try:
            fabric.acquisitions.put_nowait(acquisition)
            if fabric.is_automatic:
                acquisition.grant()
            while (event := await acquisition.events.get()) is not None:
                if isinstance(event, FabricError):
                    await abort(context, event)
                yield lease_pb2.AcquireLeaseResponse(queued=event)
            async with fabric.changed:
                await fabric.changed.wait_for(lambda: fabric.free_slots)
                if request.request_id in fabric.given_up:
                    return
                slot = fabric.free_slots.pop()
                fabric.leases[request.request_id] = slot
            asyncio.get_running_loop().call_later(
                _CLAIM_S, fabric.expire_unclaimed, request.request_id
            )
            yield lease_pb2.AcquireLeaseResponse(
                granted=lease_pb2.Granted(
                    lease=lease_pb2.Lease(claims=request.request_id.encode()),
                    lease_id=request.request_id,
                    ticket_id=request.ticket_id or f"q_{request.request_id}",
                    worker_address=fabric.worker,
                    worker_id="w",
                    claim_timeout=Duration(seconds=_CLAIM_S),
                    model=fabric.model,
                    model_label=acquisition.model_label,
                )
            )
        finally:
            acquisition.is_over.set()
            fabric.waiting.remove(acquisition)
            async with fabric.changed:
                fabric.changed.notify_all()

    async def ReleaseLease(self, request, context):
        # In this fabric, the lease id is the request id.
        name = request.lease_id or request.request_id
        self._fabric.given_up.add(name)
        await self._fabric.give_back(name)
        return lease_pb2.ReleaseLeaseResponse()


class _Sessions(_Uncalled):
    def __init__(self, fabric: ScriptedFabric) -> None:
        self._fabric = fabric

    async def Converse(self, requests, context):
        fabric = self._fabric
        first = await context.read()
        if first is grpc.aio.EOF:  # the client left before it could claim
            return
        claim = first.claim
        fabric.claimed.add(claim.lease.claims.decode())
        conversation = ScriptedConversation(claim)
        fabric.streams.add(conversation)
        reading: asyncio.Future[None] | None = None
        try:
            claimed = session_pb2.Claimed(open_timeout=Duration(seconds=60))
            await context.write(session_pb2.ConverseResponse(claimed=claimed))
            fabric.conversations.put_nowait(conversation)
            reading = asyncio.ensure_future(self._read(conversation, context))
            while True:
                response = await conversation.responses.get()
                if isinstance(response, FabricError):
                    await abort(context, response)
                await context.write(response)
                if response.WhichOneof("message") == "closed":
                    return
        finally:
            if reading:
                reading.cancel()
            conversation.is_over.set()
            fabric.streams.discard(conversation)
            await fabric.give_back(claim.lease.claims.decode())

    async def Chat(self, request, context):
        fabric = self._fabric
        fabric.claimed.add(request.lease.claims.decode())
        turn = ScriptedTurn(request)
        fabric.streams.add(turn)
        fabric.turns.put_nowait(turn)
        if fabric.is_automatic:
            turn.say(*fabric.on_turn(request))
        try:
            while True:
                response = await turn.responses.get()
                if isinstance(response, FabricError):
                    await abort(context, response)
                yield response
                if response.WhichOneof("event") == "done":
                    return
        finally:
            turn.is_over.set()
            fabric.streams.discard(turn)
            await fabric.give_back(request.lease.claims.decode())

    async def _read(self, conversation, context) -> None:
        while (request := await context.read()) is not grpc.aio.EOF:
            conversation.received.put_nowait(request)
            if not self._fabric.is_automatic:
                continue
            match request.WhichOneof("message"):
                case "open":
                    opened = session_pb2.Opened(
                        prompt_token_count=7,
                        context_token_limit=8192,
                        model_digest=self._fabric.model_digest,
                    )
                    conversation.say(session_pb2.ConverseResponse(opened=opened))
                case "rebuild":
                    rebuilt = session_pb2.Rebuilt()
                    conversation.say(session_pb2.ConverseResponse(rebuilt=rebuilt))
                case "unit":
                    conversation.say(*self._fabric.on_unit(request.unit))
        closed = session_pb2.Closed(reason=session_pb2.CLOSE_REASON_CLIENT)
        conversation.say(session_pb2.ConverseResponse(closed=closed))


class _Admin(_Uncalled):
    def __init__(self, fabric: ScriptedFabric) -> None:
        self._fabric = fabric

    async def ListWorkers(self, request, context):
        slots = [
            registry_pb2.SlotReport(
                slot=slot,
                state=(
                    registry_pb2.SLOT_STATE_FREE
                    if slot in self._fabric.free_slots
                    else registry_pb2.SLOT_STATE_OCCUPIED
                ),
            )
            for slot in range(self._fabric.slot_count)
        ]
        register = registry_pb2.Register(worker_id="w", address="10.0.0.9:8020", slots=slots)
        worker = admin_pb2.WorkerStatus(worker=register)
        return admin_pb2.ListWorkersResponse(workers=[worker])

    async def ListLeases(self, request, context):
        leases = [
            admin_pb2.LeaseStatus(
                claims=lease_pb2.LeaseClaims(
                    worker_id="w", slot=slot, kind=lease_pb2.SESSION_KIND_AUDIO_DUPLEX
                )
            )
            for slot in self._fabric.leases.values()
        ]
        return admin_pb2.ListLeasesResponse(leases=leases)

    async def EndSession(self, request, context):
        await abort(context, FabricError(Reason.UNKNOWN_SESSION, "only its own edge has it"))

    async def ListTickets(self, request, context):
        tickets = [admin_pb2.TicketStatus() for _ in self._fabric.waiting]
        return admin_pb2.ListTicketsResponse(tickets=tickets, ticket_limit=1000)
