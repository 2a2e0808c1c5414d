"""Taking a session from a worker: who is asked, and what the answers and the silence mean."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc.aio
import pytest
from support.fabric.plain_sessions import PlainSessions
from support.ports import free_ports
from support.time_limits import WITHIN_S

from duplane.fabric import attaching
from duplane.fabric.attaching import SessionTaker
from duplane.fabric.channel_pool import ChannelPool
from duplane.fabric.errors import FabricError, Reason, abort
from duplane.fabric.v1 import admin_pb2, lease_pb2, registry_pb2, session_pb2, session_pb2_grpc

POOL = "pool"
AWAY = FabricError(Reason.UNAVAILABLE, "no scheduler answers")


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the workers of a loaded machine answer late."""
    monkeypatch.setattr(attaching, "_FIRST_ANSWER_S", WITHIN_S)


class Worker(PlainSessions):
    """Gives one copy away; ends with an error if another edge had it first.

    With `has_slot` the session still has its slot.
    """

    def __init__(
        self,
        last_sequence: int = 3,
        *,
        refusal: Reason | None = None,
        has_slot: bool = False,
        is_too_late: bool = False,
        is_silent: bool = False,
    ) -> None:
        self.last_sequence = last_sequence
        self.refusal = refusal
        self.has_slot = has_slot
        self.is_too_late = is_too_late
        self.is_silent = is_silent
        self.is_taken = False
        self.was_done = asyncio.Event()  # the edge has said that it needs the copy no more
        self.was_left = asyncio.Event()  # the edge has ended the call

    async def Converse(  # pyright: ignore[reportIncompatibleMethodOverride]  # stubs: no async
        self, requests: object, context: Any
    ) -> AsyncIterator[session_pb2.ConverseResponse]:
        if not self.has_slot:
            await abort(context, FabricError(Reason.UNKNOWN_SESSION, "no slot"))
        attached = session_pb2.Attached(last_sequence=self.last_sequence)
        yield session_pb2.ConverseResponse(attached=attached)
        yield session_pb2.ConverseResponse(kept=session_pb2.Kept(is_last=True))

    async def TakeOver(  # pyright: ignore[reportIncompatibleMethodOverride]  # stubs: no async
        self, requests: AsyncIterator[session_pb2.TakeOverRequest], context: Any
    ) -> AsyncIterator[session_pb2.TakeOverResponse]:
        await anext(requests)
        if self.is_silent:
            await asyncio.Event().wait()
        refusal = Reason.SLOT_OCCUPIED if self.has_slot else self.refusal
        if refusal:
            await abort(context, FabricError(refusal, "refused"))
        attached = session_pb2.Attached(last_sequence=self.last_sequence)
        yield session_pb2.TakeOverResponse(attached=attached)
        if self.is_too_late:
            await abort(context, FabricError(Reason.SUPERSEDED, "another edge has the session"))
        try:
            yield session_pb2.TakeOverResponse(kept=session_pb2.Kept(is_last=True))
            if (await anext(requests)).is_done:
                self.was_done.set()
        finally:
            self.was_left.set()


class Scheduler:
    """Names workers, and those with a lease of the session."""

    def __init__(self, *workers: str) -> None:
        self.workers = workers
        self.leased: Sequence[str] = ()
        self.is_away = False
        self.listed: list[str] = []  # what it was asked to list

    async def administer(self, call: Callable[[Any], Awaitable[Any]]) -> Any:
        if self.is_away:
            raise AWAY
        return await call(self)

    async def ListLeases(self, request: admin_pb2.ListLeasesRequest, **_: Any) -> Any:
        self.listed.append("leases")
        claims = lease_pb2.LeaseClaims(session_id=request.session_id)
        return admin_pb2.ListLeasesResponse(
            leases=[
                admin_pb2.LeaseStatus(claims=claims, worker_address=address)
                for address in self.leased
            ]
        )

    async def ListWorkers(self, request: object, **_: Any) -> Any:
        self.listed.append("workers")
        registers = [registry_pb2.Register(pool=POOL, address=one) for one in self.workers]
        workers = [admin_pb2.WorkerStatus(worker=one) for one in registers]
        return admin_pb2.ListWorkersResponse(workers=workers)


@contextlib.asynccontextmanager
async def running(*workers: Worker) -> AsyncGenerator[list[str]]:
    async with contextlib.AsyncExitStack() as stack:
        addresses: list[str] = []
        for worker in workers:
            server = grpc.aio.server()
            session_pb2_grpc.add_SessionServiceServicer_to_server(worker, server)
            addresses.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
            await server.start()
            stack.push_async_callback(server.stop, None)
        yield addresses


class Edge:
    """What an edge has: channels to workers, and a scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.channels = ChannelPool()
        self.taker = SessionTaker(scheduler, self.channels)

    async def take(self, **fields: Any) -> session_pb2.Attached:
        attach = session_pb2.Attach(session_id="s", token_secret="x", **fields)
        async with self.taker.taken(attach, POOL) as taken:
            return taken.attached

    async def refusal(self) -> Reason:
        with pytest.raises(FabricError) as failure:
            await self.take()
        return failure.value.reason


@contextlib.asynccontextmanager
async def edge(*workers: str) -> AsyncGenerator[Edge]:
    one = Edge(Scheduler(*workers))
    try:
        yield one
    finally:
        await one.channels.close()


async def test_the_copy_with_the_most_units_is_taken() -> None:
    async with running(Worker(3), Worker(5), Worker(4)) as addresses, edge(*addresses) as one:
        assert (await one.take()).last_sequence == 5


async def test_worker_keeps_the_copy_until_the_session_is_safe() -> None:
    worker, attach = Worker(), session_pb2.Attach(session_id="s", token_secret="x")
    async with running(worker) as addresses, edge(*addresses) as one:
        for is_safe in (False, True):
            async with one.taker.taken(attach, POOL) as taken, asyncio.timeout(WITHIN_S):
                assert not worker.was_left.is_set()
                if is_safe:
                    taken.is_safe.set()
                    await worker.was_done.wait()
            async with asyncio.timeout(WITHIN_S):
                await worker.was_left.wait()
            assert worker.was_done.is_set() == is_safe
            worker.was_left.clear()


async def test_old_copy_is_not_taken_while_another_worker_is_not_ready() -> None:
    workers = Worker(3), Worker(refusal=Reason.NOT_READY)
    for order in (workers, workers[::-1]):
        async with running(*order) as addresses, edge(*addresses) as one:
            assert await one.refusal() is Reason.NOT_READY


async def test_copy_that_another_edge_got_first_is_not_taken() -> None:
    async with running(Worker(is_too_late=True)) as addresses, edge(*addresses) as one:
        assert await one.refusal() is Reason.SUPERSEDED


async def test_workers_are_listed_only_if_no_worker_with_a_lease_has_the_session() -> None:
    workers = Worker(has_slot=True), Worker(refusal=Reason.UNKNOWN_SESSION)
    async with running(*workers) as addresses, edge(*addresses) as one:
        one.scheduler.leased = addresses[:1]
        await one.take()
        assert one.scheduler.listed == ["leases"]
        one.scheduler.leased = addresses[1:]
        await one.take()  # the slot of another lease is found by the question for a copy
        assert one.scheduler.listed == ["leases"] * 2 + ["workers"]


@pytest.mark.parametrize("reason", [Reason.UNKNOWN_SESSION, Reason.COPY_STALE])
async def test_session_counts_as_lost_or_stale_only_if_all_running_workers_answer(
    reason: Reason, monkeypatch: pytest.MonkeyPatch
) -> None:
    (gone,) = free_ports(1)
    unreachable = f"127.0.0.1:{gone}"
    async with running(Worker(refusal=reason), Worker(is_silent=True)) as (here, silent):
        async with edge(here) as one:
            assert await one.refusal() is reason
            one.scheduler.workers = (here, unreachable)
            assert await one.refusal() is Reason.UNAVAILABLE
            one.scheduler.workers = (here,)
            assert await one.refusal() is reason  # the scheduler has noticed that the other is lost
            one.scheduler.leased = (unreachable,)
            assert await one.refusal() is Reason.UNAVAILABLE
        monkeypatch.setattr(attaching, "_FIRST_ANSWER_S", 0.2)
        async with edge(here, silent) as one:
            assert await one.refusal() is Reason.UNAVAILABLE


async def test_old_copy_does_not_count_while_another_worker_is_not_ready() -> None:
    workers = Worker(refusal=Reason.COPY_STALE), Worker(refusal=Reason.NOT_READY)
    for order in (workers, workers[::-1]):
        async with running(*order) as addresses, edge(*addresses) as one:
            assert await one.refusal() is Reason.NOT_READY


async def test_wrong_secret_is_refused_also_if_a_worker_does_not_answer() -> None:
    (gone,) = free_ports(1)
    worker = Worker(refusal=Reason.NOT_ALLOWED)
    async with running(worker) as (here,), edge(here, f"127.0.0.1:{gone}") as one:
        assert await one.refusal() is Reason.NOT_ALLOWED


@pytest.mark.parametrize("has_slot", [True, False], ids=["attached", "taken over"])
async def test_session_is_found_while_no_scheduler_answers(*, has_slot: bool) -> None:
    async with running(Worker(has_slot=has_slot)) as (here,), edge() as one:
        one.scheduler.is_away = True
        assert await one.refusal() is Reason.UNAVAILABLE
        async with one.channels.use(here):  # another session has used the worker
            pass
        assert (await one.take()).last_sequence == 3


async def test_edge_remembers_the_workers_that_a_scheduler_has_named() -> None:
    worker = Worker(refusal=Reason.UNKNOWN_SESSION)
    async with running(worker) as addresses, edge(*addresses) as one:
        assert await one.refusal() is Reason.UNKNOWN_SESSION
        await one.channels.close_others(())
        one.scheduler.is_away = True
        assert await one.refusal() is Reason.UNAVAILABLE
        await one.channels.close_others(())
        worker.refusal = None
        assert (await one.take()).last_sequence == 3


async def test_worker_that_the_scheduler_does_not_name_is_asked_too() -> None:
    """The scheduler has just begun, or the worker cannot reach it."""
    async with running(Worker()) as (here,), edge() as one:
        assert await one.refusal() is Reason.UNAVAILABLE
        async with one.channels.use(here):
            pass
        assert (await one.take()).last_sequence == 3
