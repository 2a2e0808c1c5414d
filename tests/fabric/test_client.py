"""FabricClient with a real scheduler: a cancelled request leaves no slot or ticket behind."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Collection
from typing import Any

import grpc.aio
import pytest
from cachetools import TTLCache
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.fabric.fault_proxy import FaultProxy
from support.ports import free_ports
from support.scheduler.scheduler_harness import AUDIO, SchedulerHarness
from support.time_limits import WITHIN_S

from duplane.fabric import avoided_workers
from duplane.fabric import client as client_module
from duplane.fabric.channel_pool import ChannelPool
from duplane.fabric.client import FabricClient
from duplane.fabric.durations import to_seconds
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.health_checks import HealthChecks
from duplane.fabric.v1 import admin_pb2, lease_pb2, lease_pb2_grpc

LIST = admin_pb2.ListTicketsRequest()
NOWHERE = "127.0.0.1:9"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def test_scheduler_address_without_a_port_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^scheduler is 'foo', must be host:port$"):
        FabricClient(["127.0.0.1:8010", "foo"])


@pytest.mark.parametrize("iterations", range(0, 60, 3))
async def test_request_cancelled_around_its_grant_holds_no_slot(iterations: int) -> None:
    """A slot is released; `iterations` passes of the event loop later the request is cancelled."""
    async with SchedulerHarness.running(claim_timeout_s=60.0) as harness:
        operator = await harness.operator()
        worker = await harness.worker()
        holder = await (await harness.caller()).granted()
        is_queued = asyncio.Event()

        async def on_queued(_: lease_pb2.Queued) -> None:
            is_queued.set()

        async with FabricClient([harness.address]) as client:
            request = lease_pb2.AcquireLeaseRequest(request_id="r", kind=AUDIO)
            acquiring = asyncio.create_task(client.acquire(request, on_queued))
            await is_queued.wait()
            releasing = asyncio.create_task(harness.release(holder.lease_id))
            for _ in range(iterations):
                await asyncio.sleep(0)
            acquiring.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                granted = await acquiring
                await client.release(granted.lease_id)
            await releasing
            await operator.until(lambda seen: not seen.leases and not seen.tickets)
        await worker.vanish()


@pytest.mark.timing
@pytest.mark.parametrize(
    ("first_answer_s", "within_s"),
    [
        (0.5, 8),  # gRPC's ping would detect it after 10 s or more
        (10 * WITHIN_S, 5),  # the health check fails; gRPC's ping would detect it after 7 s or more
    ],
    ids=["no answer", "no health"],
)
async def test_frozen_scheduler_is_left_for_the_next(
    monkeypatch: pytest.MonkeyPatch, first_answer_s: float, within_s: float
) -> None:
    """The connection to this scheduler stays open."""
    monkeypatch.setattr(client_module, "FIRST_ANSWER_S", first_answer_s)
    async with (
        SchedulerHarness.running() as harness,
        FaultProxy(harness.address) as proxy,
        FabricClient([proxy.address, harness.address]) as client,
    ):
        worker = await harness.worker()
        await client.release((await client.acquire(wanted("first"))).lease_id)
        proxy.hold()
        async with asyncio.timeout(within_s):
            await client.release((await client.acquire(wanted("second"))).lease_id)
        await worker.vanish()


def wanted(request_id: str) -> lease_pb2.AcquireLeaseRequest:
    return lease_pb2.AcquireLeaseRequest(request_id=request_id, kind=AUDIO)


async def test_operators_are_answered_by_the_next_scheduler_when_one_is_gone() -> None:
    async with SchedulerHarness.running() as gone:
        pass
    async with SchedulerHarness.running(ticket_limit=7) as harness:
        async with FabricClient([gone.address, harness.address]) as client:
            told = await client.administer(lambda admin: admin.ListTickets(LIST, timeout=WITHIN_S))
            assert told.ticket_limit == 7
            wanted = admin_pb2.CancelTicketRequest(ticket_id="q_0000000000000001")
            with pytest.raises(FabricError) as refused:
                await client.administer(lambda admin: admin.CancelTicket(wanted, timeout=WITHIN_S))
            assert refused.value.reason is Reason.UNKNOWN_TICKET
        async with FabricClient([gone.address]) as client:
            with pytest.raises(FabricError) as silent:
                await client.administer(lambda admin: admin.ListTickets(LIST, timeout=WITHIN_S))
            assert silent.value.reason is Reason.UNAVAILABLE


async def test_channel_to_a_former_record_of_a_name_is_closed_after_its_last_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with SchedulerHarness.running() as former, SchedulerHarness.running() as present:
        records = [former.address]

        async def resolve(_: object) -> list[str]:
            return list(records)

        monkeypatch.setattr(client_module, "resolve", resolve)
        async with FabricClient(["schedulers.test:1"]) as client:
            waiting = asyncio.create_task(client.acquire(wanted("at the former")))
            operator = await former.operator()
            await operator.until(lambda seen: len(seen.tickets) == 1)
            records[:] = [present.address]
            await client._find_schedulers()
            assert set(client._to_schedulers.addresses) == {former.address}
            worker = await former.worker()
            await waiting
            assert not client._to_schedulers.addresses
            await client.administer(lambda admin: admin.ListTickets(LIST, timeout=WITHIN_S))
            assert set(client._to_schedulers.addresses) == {present.address}
        await worker.vanish()


class ScriptedLeases(lease_pb2_grpc.LeaseServiceServicer):
    """A scheduler of which no lease is released."""

    async def ReleaseLease(
        self, request: object, context: object
    ) -> lease_pb2.ReleaseLeaseResponse:
        raise NotImplementedError


@contextlib.asynccontextmanager
async def client_of(leases: ScriptedLeases) -> AsyncGenerator[FabricClient]:
    """Serve `leases`, and yield a client of this scheduler; the whole body has a time limit."""
    server = grpc.aio.server()
    lease_pb2_grpc.add_LeaseServiceServicer_to_server(leases, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with FabricClient([f"127.0.0.1:{port}"]) as client, asyncio.timeout(WITHIN_S):
            yield client
    finally:
        await server.stop(None)


class NeverEnding(ScriptedLeases):
    """A scheduler that hangs after its grant."""

    async def AcquireLease(  # pyright: ignore[reportIncompatibleMethodOverride]  # stubs: yields
        self, request: object, context: grpc.aio.ServicerContext[object, object]
    ) -> None:
        granted = lease_pb2.Granted(lease_id="lease")
        await context.write(lease_pb2.AcquireLeaseResponse(granted=granted))
        await asyncio.Event().wait()


async def test_grant_is_used_though_its_call_does_not_end() -> None:
    async with client_of(NeverEnding()) as client:
        granted = await client.acquire(wanted("request"))
        assert granted.lease_id == "lease"


class Restarting(ScriptedLeases):
    """A scheduler that has lost its queue: it counts more tickets ahead than before."""

    def __init__(self) -> None:
        self.positions = [2, 5]

    async def AcquireLease(  # pyright: ignore[reportIncompatibleMethodOverride]  # stubs: yields
        self, request: object, context: grpc.aio.ServicerContext[object, object]
    ) -> None:
        queued = lease_pb2.Queued(ticket_id="q_1", position=self.positions.pop(0))
        await context.write(lease_pb2.AcquireLeaseResponse(queued=queued))
        if self.positions:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "restarting")
        await context.write(lease_pb2.AcquireLeaseResponse(granted=lease_pb2.Granted()))


async def test_position_never_grows_when_a_scheduler_has_lost_its_queue() -> None:
    positions: list[int] = []

    async def on_queued(queued: lease_pb2.Queued) -> None:
        positions.append(queued.position)

    async with client_of(Restarting()) as client:
        await client.acquire(wanted("request"), on_queued)
    assert positions == [2, 2]


async def test_waiting_request_returns_as_soon_as_a_scheduler_listens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "CONNECT_S", 10 * WITHIN_S)
    until_any_ready, waits = ChannelPool.until_any_ready, asyncio.Event()

    async def noted(pool: ChannelPool, addresses: Collection[str], timeout_s: float) -> None:
        waits.set()
        await until_any_ready(pool, addresses, timeout_s)

    monkeypatch.setattr(ChannelPool, "until_any_ready", noted)
    async with SchedulerHarness.running() as harness:
        await harness.stop()
        async with FabricClient([harness.address]) as client, asyncio.timeout(WITHIN_S):
            is_queued = asyncio.Event()

            async def on_queued(_: lease_pb2.Queued) -> None:
                is_queued.set()

            acquiring = asyncio.create_task(client.acquire(wanted("request"), on_queued))
            await waits.wait()
            await harness.start()
            await is_queued.wait()
            acquiring.cancel()
            await asyncio.wait([acquiring])


class Noting(ScriptedLeases):
    """A scheduler that refuses the first call and grants the second."""

    def __init__(self) -> None:
        self.requests: list[lease_pb2.AcquireLeaseRequest] = []

    async def AcquireLease(  # pyright: ignore[reportIncompatibleMethodOverride]  # stubs: yields
        self, request: lease_pb2.AcquireLeaseRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        self.requests.append(request)
        if len(self.requests) == 1:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "restarting")
        await context.write(lease_pb2.AcquireLeaseResponse(granted=lease_pb2.Granted()))


class PassingCache(TTLCache[str, Any, float]):
    """A cache for which half a second passes each time that it looks at the clock."""

    def __init__(self, size: int, ttl_s: float) -> None:
        super().__init__(size, ttl_s, timer=itertools.count(36_077.123, 0.5).__next__)


async def test_worker_may_cease_to_be_avoided_while_a_request_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(avoided_workers, "TTLCache", PassingCache)
    noting = Noting()
    async with client_of(noting) as client:
        for worker_id in ("one", "another", "third", "fourth"):
            client.report_unreachable(lease_pb2.Granted(lease_id="lease", worker_id=worker_id))
        while not noting.requests or noting.requests[-1].avoided_worker_ids:
            await client.acquire(wanted("request"))


async def test_request_says_how_long_it_still_avoids_a_worker() -> None:
    noting = Noting()
    async with client_of(noting) as client:
        client.report_unreachable(lease_pb2.Granted(lease_id="lease", worker_id="lost"))
        await client.acquire(wanted("request"))
    assert [list(one.avoided_worker_ids) for one in noting.requests] == [["lost"], ["lost"]]
    first_s, second_s = (to_seconds(one.avoided_duration) for one in noting.requests)
    assert 0 < second_s < first_s <= 15


async def test_request_names_the_incarnations_that_it_avoids() -> None:
    noting = Noting()
    lost = lease_pb2.Granted(lease_id="lease", worker_id="lost", worker_incarnation="lost/1")
    own = wanted("request")
    own.avoided_worker_ids.append("left")
    own.avoided_worker_incarnations.append("left/1")
    async with client_of(noting) as client:
        client.report_unreachable(lost)
        await client.acquire(own)
    named = [
        dict(zip(one.avoided_worker_ids, one.avoided_worker_incarnations, strict=True))
        for one in noting.requests
    ]
    assert named == 2 * [{"left": "left/1", "lost": "lost/1"}]


class Unclaimable(ScriptedLeases):
    """A scheduler that grants slots of a worker that cannot be reached."""

    def __init__(self) -> None:
        self.requests: asyncio.Queue[lease_pb2.AcquireLeaseRequest] = asyncio.Queue()

    async def AcquireLease(  # pyright: ignore[reportIncompatibleMethodOverride]  # stubs: yields
        self, request: lease_pb2.AcquireLeaseRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        self.requests.put_nowait(request)
        granted = lease_pb2.Granted(ticket_id="q_1", worker_address="127.0.0.1:1")
        await context.write(lease_pb2.AcquireLeaseResponse(granted=granted))


async def test_request_whose_slot_could_not_be_claimed_says_that_it_had_one() -> None:
    async def open_session(client: FabricClient) -> None:
        async with client.session(wanted("request")):
            pass

    leases = Unclaimable()
    async with client_of(leases) as client:
        opening = asyncio.create_task(open_session(client))
        first, second = await leases.requests.get(), await leases.requests.get()
        opening.cancel()
        await asyncio.wait([opening])
    assert (first.ticket_id, first.was_granted) == ("", False)
    assert (second.ticket_id, second.was_granted) == ("q_1", True)


class CountedHealth(health_pb2_grpc.HealthServicer):
    """A health service that counts the checks, and answers each with `status`."""

    def __init__(self, status: health_pb2.HealthCheckResponse.ServingStatus = SERVING) -> None:
        self.status = status
        self.count = 0
        self.changed = asyncio.Condition()

    async def Check(self, request: object, context: object) -> health_pb2.HealthCheckResponse:
        async with self.changed:
            self.count += 1
            self.changed.notify_all()
        return health_pb2.HealthCheckResponse(status=self.status)

    async def until_checked(self, count: int) -> None:
        async with self.changed:
            await self.changed.wait_for(lambda: self.count >= count)

    @contextlib.asynccontextmanager
    async def serving(
        self, leases: lease_pb2_grpc.LeaseServiceServicer, listen: str = "127.0.0.1:0"
    ) -> AsyncGenerator[str]:
        """Serve, and yield the address; the whole body has a time limit."""
        server = grpc.aio.server()
        health_pb2_grpc.add_HealthServicer_to_server(self, server)
        lease_pb2_grpc.add_LeaseServiceServicer_to_server(leases, server)
        port = server.add_insecure_port(listen)
        await server.start()
        try:
            async with asyncio.timeout(WITHIN_S):
                yield f"127.0.0.1:{port}"
        finally:
            await server.stop(None)


class Slow(ScriptedLeases):
    """A scheduler that waits for its store before it grants."""

    def __init__(self) -> None:
        self.may_grant = asyncio.Event()

    async def AcquireLease(  # pyright: ignore[reportIncompatibleMethodOverride]  # stubs: yields
        self, request: object, context: grpc.aio.ServicerContext[object, object]
    ) -> None:
        await self.may_grant.wait()
        granted = lease_pb2.Granted(lease_id="lease of the slow one")
        await context.write(lease_pb2.AcquireLeaseResponse(granted=granted))


async def test_scheduler_that_is_only_slow_is_not_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "FIRST_ANSWER_S", 10 * WITHIN_S)
    health, slow = CountedHealth(), Slow()
    async with health.serving(slow) as address, FabricClient([address, NOWHERE]) as client:
        acquiring = [asyncio.create_task(client.acquire(wanted(f"{n}"))) for n in range(9)]
        await health.until_checked(2)
        assert health.count == 2  # all requests share a check
        slow.may_grant.set()
        assert {(await one).lease_id for one in acquiring} == {"lease of the slow one"}


@pytest.mark.parametrize("status", [SERVING, NOT_SERVING])
async def test_worker_is_avoided_until_it_serves_again(
    status: health_pb2.HealthCheckResponse.ServingStatus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(avoided_workers, "_AVOID_S", 10 * WITHIN_S)
    health, noting = CountedHealth(status), Noting()
    async with health.serving(noting) as address, FabricClient([address]) as client:
        lost = lease_pb2.Granted(lease_id="lease", worker_id="lost", worker_address=address)
        client.report_unreachable(lost)
        await client.acquire(wanted("before"))
        assert list(noting.requests[-1].avoided_worker_ids) == ["lost"]
        await health.until_checked(1 if status == SERVING else 2)
        while noting.requests[-1].avoided_worker_ids and status == SERVING:
            await client.acquire(wanted("after"))
        await client.acquire(wanted("at last"))
        expected = [] if status == SERVING else ["lost"]
        assert list(noting.requests[-1].avoided_worker_ids) == expected


async def test_process_that_listens_where_another_was_lost_is_reached_immediately() -> None:
    """A channel that has failed refuses calls until its next attempt, some 100 ms later."""
    health = CountedHealth()
    pool = ChannelPool()
    checks = HealthChecks(pool)
    for port in free_ports(3):
        address = f"127.0.0.1:{port}"
        async with health.serving(Noting(), address):
            assert await checks.answers(address, WITHIN_S)
        assert not await checks.answers(address, WITHIN_S)
        async with health.serving(Noting(), address):
            assert await checks.answers(address, WITHIN_S)
        assert pool.addresses == {address}
        await pool.close_others([])
    await pool.close()
