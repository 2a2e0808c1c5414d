"""A runner of a duplex session whose fabric and client are in memory.

`MovedRunner` grants the workers of a list one after the other.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Any, cast

import orjson
from support.edge.moved_play import CHUNK, LOST
from support.monitoring.metrics import read
from support.protocols.transcripts import json_of
from support.time_limits import WITHIN_S

from duplane.edge.clock import Clock, LoopClock
from duplane.edge.close import Close
from duplane.edge.identity import Identity
from duplane.edge.metrics import EdgeMetrics
from duplane.edge.routing import ENDPOINTS, Route
from duplane.edge.session.continuity import Continuity, RebuildPermits
from duplane.edge.session.duplex_runner import DuplexRunner
from duplane.edge.session.duplex_session import DuplexSession
from duplane.edge.settings import Limits
from duplane.edge.spans import SessionSpans
from duplane.fabric.errors import FabricError
from duplane.fabric.journal import JournalSpace
from duplane.fabric.monitoring.spans import Telemetry
from duplane.fabric.v1 import lease_pb2, session_pb2

Response = session_pb2.ConverseResponse
_CANCELLED = asyncio.CancelledError()  # as grpc.aio raises it from a read of a cancelled call


class WorkerDouble:
    """A worker, and the stream of the session to it.

    `ends` has, for some kinds of message, the error with which the worker answers. The worker does
    not answer a kind whose error is None.
    """

    def __init__(self, digest: str = "m", name: str = "", **ends: FabricError | None) -> None:
        self.digest, self.name = digest, name
        self.ends = ends
        self.granted = lease_pb2.Granted()
        self.claimed = session_pb2.Claimed()
        self.is_claimed = False
        self.is_cancelled = False
        self.has_input_ended = False
        self.closes = True  # the worker answers the end of the session
        self._received: asyncio.Queue[str] = asyncio.Queue()
        self._responses: asyncio.Queue[Response | BaseException] = asyncio.Queue()

    async def until(self, kind: str) -> None:
        """Wait until the worker has received a message of this kind."""
        async with asyncio.timeout(WITHIN_S):
            while await self._received.get() != kind:
                pass

    async def write(self, request: session_pb2.ConverseRequest) -> None:
        kind = request.WhichOneof("message") or ""
        self._received.put_nowait(kind)
        end = self.ends.get(kind)
        if end is not None:
            self._responses.put_nowait(end)
        elif kind not in self.ends:
            self._responses.put_nowait(self._answer(kind, request.unit.sequence))

    def _answer(self, kind: str, sequence: int) -> Response:
        match kind:
            case "open":
                opened = session_pb2.Opened(prompt_token_count=7, model_digest=self.digest)
                return Response(opened=opened)
            case "rebuild":
                return Response(rebuilt=session_pb2.Rebuilt())
            case _:
                delta = session_pb2.Delta(
                    sequence=sequence,
                    listen=session_pb2.Listen(),
                    state_change=session_pb2.StateChange(),
                )
                return Response(delta=delta)

    async def read(self) -> Response:
        response = await self._responses.get()
        if isinstance(response, BaseException):
            raise response
        return response

    async def end_input(self) -> None:
        self.has_input_ended = True
        if self.closes:
            closed = session_pb2.Closed(reason=session_pb2.CLOSE_REASON_CLIENT)
            self._responses.put_nowait(Response(closed=closed))

    def cancel(self) -> None:
        self.is_cancelled = True
        self._responses.put_nowait(_CANCELLED)

    def undrain(self) -> None:
        self._responses.put_nowait(Response(staying=session_pb2.Staying()))

    def drain(self) -> None:
        leaving = session_pb2.Leaving(reason=session_pb2.LEAVING_REASON_DRAIN)
        self._responses.put_nowait(Response(leaving=leaving))

    def answer(self, kind: str, sequence: int = 0) -> None:
        """Answer a message that had no answer."""
        self._responses.put_nowait(self._answer(kind, sequence))

    def lose(self) -> None:
        self._responses.put_nowait(LOST)

    def fail(self, error: Exception) -> None:
        """Let the session read an error that no worker sends."""
        self._responses.put_nowait(error)


class _GrantsInTurn:
    """Grants a slot of each worker in turn, and after that always a slot of the last worker."""

    def __init__(self, workers: Sequence[WorkerDouble]) -> None:
        self.requests: list[lease_pb2.AcquireLeaseRequest] = []
        self.unreachable: list[str] = []
        self.has_released = asyncio.Event()  # a slot was given back
        self.may_release = asyncio.Event()  # else a slot that is given back stays held
        self.may_release.set()
        self._workers = workers

    @contextlib.asynccontextmanager
    async def session(
        self, request: lease_pb2.AcquireLeaseRequest, _: Any, __: Any, on_granted: Any
    ) -> AsyncGenerator[WorkerDouble]:
        self.requests.append(request)
        number = min(len(self.requests), len(self._workers)) - 1
        worker = self._workers[number]
        name = worker.name or f"w{number}"
        worker.granted = lease_pb2.Granted(
            worker_id=name,
            worker_address=name,
            worker_incarnation=f"{name}/1",
            model_label="label",
            ticket_id="t",
            lease_id=f"lease_{name}",
        )
        try:
            on_granted(worker.granted)
            worker.is_claimed = True
            yield worker
        finally:
            await self.may_release.wait()
            self.has_released.set()

    def report_unreachable(self, granted: lease_pb2.Granted) -> None:
        self.unreachable.append(granted.worker_id)


class _Client:
    def __init__(self) -> None:
        self.events: asyncio.Queue[str] = asyncio.Queue()

    async def serve(self, receiver: object) -> None:
        del receiver
        await asyncio.Event().wait()

    def send(self, events: list[bytes], on_written: Callable[[], None] | None = None) -> None:
        for event in events:
            self.events.put_nowait(orjson.loads(event)["type"])
        if on_written:
            on_written()

    async def close(self, close: Close, code: int) -> None:
        pass


class MovedRunner:
    """A session of dialect C whose conversation is open at the first worker."""

    def __init__(
        self,
        workers: Sequence[WorkerDouble],
        limits: Limits,
        clock: Clock | None = None,
        telemetry: Telemetry | None = None,
    ) -> None:
        clock = clock or LoopClock()
        space = JournalSpace(limits.journal_bytes, limits.journal_total_bytes)
        self.space, self.permits = space, RebuildPermits(limits.rebuild_count)
        continuity = Continuity(space, self.permits)
        session = ENDPOINTS[Route.DUPLEX, "audio"].new_session(
            Identity("s", "rt_0"), limits, clock.now(), continuity
        )
        assert isinstance(session, DuplexSession)
        self.session = session
        self.fabric, self.client = _GrantsInTurn(workers), _Client()
        self.metrics = EdgeMetrics(no_states, 0.1)
        self.spans = SessionSpans(telemetry or Telemetry("edge"), "s", clock)
        self.runner = DuplexRunner(
            session,
            self.client,
            limits,
            cast("Any", self.fabric),
            self.spans,
            clock,
            self.metrics,
        )

    @classmethod
    @contextlib.asynccontextmanager
    async def running(
        cls,
        *workers: WorkerDouble,
        limits: Limits | None = None,
        clock: Clock | None = None,
        telemetry: Telemetry | None = None,
        model: str = "",
    ) -> AsyncGenerator[MovedRunner]:
        """Run the session until it has ended. The body of the `with` must cause this end.

        The client names `model`.
        """
        play = cls(workers, limits or Limits(), clock, telemetry)
        running = asyncio.create_task(play.runner.run(lease_pb2.AcquireLeaseRequest(model=model)))
        await play.say('{"type":"prepare"}')
        await play.until("prepared")
        yield play
        async with asyncio.timeout(WITHIN_S):
            await running

    async def say(self, text: str) -> None:
        await self.runner.receive(orjson.dumps(json_of(text)))

    async def chunk(self) -> None:
        await self.say(CHUNK)

    async def exchange(self) -> None:
        await self.chunk()
        await self.until("result")

    async def until(self, kind: str) -> None:
        """Wait until the client has received an event of this type."""
        async with asyncio.timeout(WITHIN_S):
            while await self.client.events.get() != kind:
                pass

    def hedge(self) -> None:
        """Make the runner treat the only worker that owes an answer as overdue."""
        (slot,) = self.runner.overdue_slots(0)
        self.runner.hedge(slot)

    def lose_overdue(self) -> None:
        """Make the runner leave the only worker that owes an answer."""
        (slot,) = self.runner.overdue_slots(0)
        self.runner.lose(slot)

    def count(self, name: str, **labels: str) -> float:
        return read(self.metrics.registry).total(name, **labels)


def no_states() -> Iterator[tuple[str, str]]:
    return iter(())
