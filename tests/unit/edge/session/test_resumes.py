"""Clients that ask for a session with a lost socket, or after another edge has taken it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable

import orjson
from support.edge.moved_runner import MovedRunner, WorkerDouble
from support.time_limits import WITHIN_S

from duplane.edge.access import Caller, CallerKind
from duplane.edge.clock import LoopClock
from duplane.edge.close import Close, CloseReason
from duplane.edge.dialects.actions import Return
from duplane.edge.identity import Identity
from duplane.edge.resumes import Resumes
from duplane.edge.routing import ENDPOINTS, Route
from duplane.edge.session.duplex_session import DuplexSession
from duplane.edge.settings import Limits
from duplane.edge.transport.client import Receiver
from duplane.fabric.v1 import lease_pb2

CALLER = Caller(CallerKind.ANONYMOUS)


class LostSocket:
    """A socket that is lost before its session could get it."""

    is_open = False
    closed_with = 0

    async def serve(self, receiver: Receiver) -> None:
        raise AssertionError("the socket is lost")

    def send(self, events: list[bytes], on_written: Callable[[], None] | None = None) -> None:
        pass

    async def close(self, close: Close, code: int) -> None:
        self.closed_with = code


class Resumable:
    """A resumable session of dialect C, and the sessions of its edge."""

    def __init__(self, play: MovedRunner) -> None:
        self.play = play
        self.resumes = Resumes({play.runner: CALLER}, play.metrics, LoopClock())
        assert play.session.detachment
        self.detachment = play.session.detachment
        self.secret = self.detachment.new_secret()

    @classmethod
    @contextlib.asynccontextmanager
    async def running(cls) -> AsyncGenerator[Resumable]:
        """Run the session until the body of the `with` ends it."""
        play = MovedRunner([WorkerDouble()], Limits())
        running = asyncio.create_task(play.runner.run(lease_pb2.AcquireLeaseRequest()))
        await play.say('{"type":"prepare","resumable":true}')
        await play.until("prepared")
        yield cls(play)
        async with asyncio.timeout(WITHIN_S):
            await running

    def asking(self) -> DuplexSession:
        """Return the session of a new socket that asks for this one."""
        endpoint, now = ENDPOINTS[Route.DUPLEX, "audio"], LoopClock().now()
        asking = endpoint.new_session(Identity("s2", "rt_2"), Limits(), now)
        assert isinstance(asking, DuplexSession)
        asking.receive(orjson.dumps({"type": "resume", "token": f"s.{self.secret}"}), now)
        return asking


async def test_socket_that_is_lost_meanwhile_leaves_the_live_one_alone() -> None:
    async with Resumable.running() as session:
        lost = LostSocket()
        await session.resumes.run(lost, session.asking(), CALLER)
        assert lost.closed_with == 1013
        assert session.play.runner.generation == 0
        await session.play.exchange()
        await session.play.say('{"type":"stop"}')


async def test_session_without_a_socket_that_another_edge_has_taken_is_left_to_it() -> None:
    async with Resumable.running() as session:
        await session.play.exchange()
        newer, known = Return("s", session.secret, 1, 0), Return("s", session.secret, 0, 0)
        assert not session.resumes.may_be_elsewhere(newer)  # its socket is alive
        session.play.runner.disconnected(Close(CloseReason.GONE))
        assert session.resumes.may_be_elsewhere(newer)
        session.detachment.park()
        session.play.session.moves.park(LoopClock().now())
        assert not session.resumes.may_be_elsewhere(known)
        assert not session.resumes.may_be_elsewhere(Return("s", "wrong", 1, 0))
        assert session.resumes.may_be_elsewhere(newer)
        assert session.play.session.closed is None  # nobody knows yet whether it is elsewhere
        session.resumes.forget(newer)
        assert session.play.session.closed
        assert session.play.session.closed.reason is CloseReason.REPLACED
