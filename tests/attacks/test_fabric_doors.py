"""What a process without credentials tries at the ports of a fabric without TLS."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2
from support.fabric.in_process import LocalWorker, failure_of
from support.scheduler.scheduler_harness import (
    AUDIO,
    FREE,
    FakeWorker,
    SchedulerHarness,
    slot_reports,
)
from support.time_limits import WITHIN_S

from duplane.fabric.channel import CallLimits, FabricServer, health_grpc, open_channel
from duplane.fabric.client import FabricClient
from duplane.fabric.errors import FabricError, Reason, from_rpc
from duplane.fabric.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    lease_pb2,
    lease_pb2_grpc,
    registry_pb2,
    session_pb2,
    session_pb2_grpc,
)


class Stranger:
    """A process that can connect to the scheduler, and knows what its lists show."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.leases: lease_pb2_grpc.LeaseServiceAsyncStub = lease_pb2_grpc.LeaseServiceStub(channel)
        self.admin: admin_pb2_grpc.AdminServiceAsyncStub = admin_pb2_grpc.AdminServiceStub(channel)

    async def listed_worker(self) -> admin_pb2.WorkerStatus:
        (worker,) = (await self.admin.ListWorkers(admin_pb2.ListWorkersRequest())).workers
        return worker

    async def listed_leases(self) -> list[str]:
        leases = (await self.admin.ListLeases(admin_pb2.ListLeasesRequest())).leases
        return [lease.claims.lease_id for lease in leases]

    async def listed_tickets(self) -> list[str]:
        tickets = (await self.admin.ListTickets(admin_pb2.ListTicketsRequest())).tickets
        return [ticket.ticket_id for ticket in tickets]

    async def release(self, **fields: Any) -> None:
        """Give a lease back with no key and with another key than its holder's."""
        for key in (b"", secrets.token_bytes()):
            await self.leases.ReleaseLease(
                lease_pb2.ReleaseLeaseRequest(caller_key=key, **fields), timeout=WITHIN_S
            )


@contextlib.asynccontextmanager
async def attacked() -> AsyncGenerator[tuple[SchedulerHarness, FabricClient, Stranger]]:
    async with (
        SchedulerHarness.running() as harness,
        FabricClient([harness.address]) as client,
        asyncio.timeout(WITHIN_S),
    ):
        yield harness, client, Stranger(await harness.channel())


def wanted(request_id: str, **fields: Any) -> lease_pb2.AcquireLeaseRequest:
    return lease_pb2.AcquireLeaseRequest(request_id=request_id, kind=AUDIO, **fields)


@contextlib.asynccontextmanager
async def waiting(
    client: FabricClient, request_id: str
) -> AsyncGenerator[tuple[asyncio.Task[lease_pb2.Granted], lease_pb2.Queued]]:
    """Wait for a slot during the body of the `with`; yield the wait and the place."""
    places: asyncio.Queue[lease_pb2.Queued] = asyncio.Queue()
    task = asyncio.create_task(client.acquire(wanted(request_id), places.put))
    try:
        yield task, await places.get()
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_listed_lease_is_ended_by_its_holder_only() -> None:
    async with attacked() as (harness, client, stranger):
        worker = await harness.worker()
        granted = await client.acquire(wanted("r"))
        assert await stranger.listed_leases() == [granted.lease_id]
        await stranger.release(lease_id=granted.lease_id)
        assert await stranger.listed_leases() == [granted.lease_id], "before the claim"
        await worker.claim(granted)
        await stranger.release(lease_id=granted.lease_id)
        await client.release(granted.lease_id)
        await worker.revoked()
        revoked = [one for one in worker.received if one.HasField("revoke")]
        assert len(revoked) == 1, "only the holder's release may reach the worker"


@pytest.mark.parametrize("key", [b"", b"another"])
async def test_guessed_request_id_touches_no_request_of_another_caller(key: bytes) -> None:
    async with attacked() as (harness, client, stranger):
        async with waiting(client, "guessed") as (acquiring, place):
            await stranger.release(request_id="guessed")
            repeated = await harness.caller(request_id="guessed", caller_key=key)
            await repeated.stands(2)
            worker = await harness.worker()
            granted = await acquiring
            assert granted.ticket_id == place.ticket_id
            await stranger.release(request_id="guessed")
            await worker.claim(granted)
        assert not [one for one in worker.received if one.HasField("revoke")]


async def test_lease_is_not_handed_to_a_caller_that_repeats_its_request() -> None:
    async with attacked() as (harness, client, stranger):
        await harness.worker()
        granted = await client.acquire(wanted("guessed"))
        repeated = await harness.caller(request_id="guessed")
        await repeated.stands(1)
        assert await stranger.listed_leases() == [granted.lease_id]


def just_before(ticket_id: str) -> str:
    return f"q_{int(ticket_id[2:], 16) - 1:016x}"


async def test_ticket_id_that_was_made_up_or_read_from_a_list_stands_last() -> None:
    async with attacked() as (harness, client, stranger):
        worker = await harness.worker()
        await worker.claim(await client.acquire(wanted("holder")))
        async with waiting(client, "victim") as (acquiring, place):
            (listed,) = await stranger.listed_tickets()
            assert listed == place.ticket_id
            forged = ("q_0000000000000001", just_before(listed), listed)
            callers = [await harness.caller(ticket_id=ticket_id) for ticket_id in forged]
            callers += [
                await harness.caller(ticket_id=ticket_id, ticket_proof=secrets.token_bytes())
                for ticket_id in forged
            ]
            for caller in callers:
                await caller.read()
            assert min(caller.position for caller in callers) == 2
            assert (await stranger.listed_tickets())[0] == listed
            await worker.finish(0)
            assert (await acquiring).ticket_id == listed


async def test_proof_of_one_ticket_proves_no_other_ticket_and_no_other_caller() -> None:
    async with attacked() as (harness, client, _):
        worker = await harness.worker()
        await worker.claim(await client.acquire(wanted("holder")))
        async with waiting(client, "victim") as (_, place):
            own = await harness.caller(caller_key=b"stranger")
            await own.stands(2)
            proof = own.queued[-1].ticket_proof
            stolen = await harness.caller(
                caller_key=b"stranger", ticket_id=place.ticket_id, ticket_proof=proof
            )
            await stolen.stands(3)
            copied = await harness.caller(
                caller_key=b"stranger", ticket_id=place.ticket_id, ticket_proof=place.ticket_proof
            )
            await copied.stands(4)


async def test_waiting_ticket_that_claims_to_have_had_a_slot_stays_in_its_place() -> None:
    async with attacked() as (harness, client, _):
        worker = await harness.worker()
        await worker.claim(await client.acquire(wanted("holder")))
        async with waiting(client, "victim") as (acquiring, _):
            own = await harness.caller(caller_key=b"stranger", tenant_id="stranger")
            await own.read()
            again = await harness.caller(
                caller_key=b"stranger", tenant_id="stranger", was_granted=True, **own.place
            )
            await again.read()
            await worker.finish(0)
            await worker.claim(await acquiring)


@pytest.mark.parametrize("number", [2**62 - 1, 2**63 - 1])
async def test_poisoned_fencing_number_is_refused_and_stops_no_worker(number: int) -> None:
    async with attacked() as (harness, client, _):
        slots = slot_reports(FREE)
        slots[0].fencing_number = number
        refused = await failure_of(lambda: harness.worker("poison", slots=slots))
        assert (refused.reason, refused.field) == (
            Reason.INVALID_FIELD,
            "register.slots[0].fencing_number",
        )
        liar = await harness.worker("liar", slot_count=2)
        liar.slots[1].fencing_number = number
        await liar.report()
        assert (await liar.ended()).field == "report.slots[1].fencing_number"
        worker = await harness.worker("legal")
        granted = await client.acquire(wanted("r"))
        claims = await worker.claim(granted)
        assert claims.fencing_number < number
        await worker.finish(0)
        await worker.vanish()
        await worker.attach_again()


async def test_registration_cannot_be_taken_over_with_what_lists_and_grants_show() -> None:
    async with attacked() as (harness, client, stranger):
        operator = await harness.operator()
        worker = await harness.worker("real", stream_number=5)
        secret = worker.register.incarnation
        granted = await client.acquire(wanted("r"))
        await operator.until(lambda seen: bool(seen.leases))
        listed = await stranger.listed_worker()
        shown = (listed, granted, *operator.steps)
        assert not [one for one in shown if secret.encode() in one.SerializeToString()]
        assert (listed.worker.incarnation, listed.worker.stream_number) == ("", 0)
        for incarnation in (granted.worker_incarnation, listed.worker.worker_id):
            copy = registry_pb2.Register()
            copy.CopyFrom(listed.worker)
            copy.incarnation, copy.stream_number = incarnation, 2**63 - 1
            copy.address = "127.0.0.1:2"
            thief = FakeWorker(await harness.channel(), copy)
            refused = await failure_of(thief.attach)
            assert refused.reason is Reason.WORKER_ATTACHED
        await worker.claim(granted)
        assert (await stranger.listed_worker()).worker.address == worker.register.address


async def test_sound_worker_is_not_switched_off_by_a_report_that_it_is_unreachable() -> None:
    async with attacked() as (harness, client, stranger):
        local = LocalWorker(
            None, schedulers=(harness.address,), checkpoint="scripted", worker_id="sound"
        )
        try:
            operator = await harness.operator()
            await operator.until(lambda seen: "sound" in seen.workers)
            for number in range(3):
                await stranger.release(lease_id="none", unreachable_worker_id="sound")
                granted = await client.acquire(wanted(f"r{number}"))
                assert granted.worker_id == "sound"
                await client.release(granted.lease_id)
            assert not [one for one in operator.steps if one.worker.is_unreachable]
        finally:
            await local.drain()


async def test_watches_are_bounded_and_lists_still_answer() -> None:
    async with attacked() as (harness, _, stranger):
        await harness.worker()
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(64):
                watch = stranger.admin.Watch(admin_pb2.WatchRequest())
                stack.callback(watch.cancel)
                await watch.read()
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stranger.admin.Watch(admin_pb2.WatchRequest()).read()
            assert from_rpc(refused.value).reason is Reason.TOO_MANY_WATCHES
            await stranger.listed_worker()


@pytest.mark.parametrize("method", ["Chat", "Converse"])
async def test_call_with_a_void_lease_is_refused_before_its_first_message_is_sent(
    method: str,
) -> None:
    async with attacked() as (harness, _, _):
        local = LocalWorker(
            None, schedulers=(harness.address,), checkpoint="scripted", worker_id="w"
        )
        try:
            operator = await harness.operator()
            await operator.until(lambda seen: "w" in seen.workers)
            address = operator.workers["w"].worker.address
            junk = lease_pb2.Lease(claims=b"junk", signature=b"junk", key_id="junk")
            metadata = (("duplane-lease-bin", junk.SerializeToString()),)
            async with open_channel(address) as channel:
                path = f"/duplane.fabric.v1.SessionService/{method}"
                call: Any = channel.stream_stream(path)(metadata=metadata)
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await call.read()  # no message was written
                assert from_rpc(refused.value).reason is Reason.LEASE_FORGED
        finally:
            await local.drain()


async def test_chat_with_another_lease_than_the_one_that_was_checked_is_refused() -> None:
    async with attacked() as (harness, client, _):
        local = LocalWorker(
            None, schedulers=(harness.address,), checkpoint="scripted", worker_id="w"
        )
        try:
            operator = await harness.operator()
            await operator.until(lambda seen: "w" in seen.workers)
            granted = await client.acquire(
                lease_pb2.AcquireLeaseRequest(
                    request_id="r", kind=lease_pb2.SESSION_KIND_AUDIO_DUPLEX
                )
            )
            other = lease_pb2.Lease(claims=granted.lease.claims, signature=b"", key_id="junk")
            async with open_channel(granted.worker_address) as channel:
                call = session_pb2_grpc.SessionServiceStub(channel).Converse(
                    metadata=(("duplane-lease-bin", granted.lease.SerializeToString()),)
                )
                claim = session_pb2.Claim(lease=other)
                await call.write(session_pb2.ConverseRequest(claim=claim))
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await call.read()
                failure: FabricError = from_rpc(refused.value)
                assert (failure.reason, failure.field) == (Reason.INVALID_FIELD, "claim.lease")
        finally:
            await local.drain()


@pytest.mark.parametrize(
    "rpc", ["LeaseService/AcquireLease", "LeaseService/ReleaseLease", "AdminService/ListWorkers"]
)
async def test_scheduler_reads_no_long_message_before_it_judges_the_call(rpc: str) -> None:
    """gRPC reads the message of such a call first, so its limit is that of unknown callers."""
    async with attacked() as (harness, _, _), open_channel(harness.address) as channel:
        method: Any = channel.unary_stream(f"/duplane.fabric.v1.{rpc}")
        call = method(bytes(2 << 20))
        with pytest.raises(grpc.aio.AioRpcError, match="larger than max") as refused:
            await call.read()
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_server_that_runs_too_many_calls_counts_as_unavailable() -> None:
    """So its callers go to another scheduler or worker, and do not fail."""
    server = FabricServer(limits=CallLimits(total=1))
    address = await server.start("127.0.0.1:0")
    try:
        async with open_channel(address) as channel, asyncio.timeout(WITHIN_S):
            health = health_grpc.HealthStub(channel)
            watch = health.Watch(health_pb2.HealthCheckRequest())
            await watch.read()
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await health.Check(health_pb2.HealthCheckRequest())
            assert from_rpc(refused.value).reason is Reason.UNAVAILABLE
            watch.cancel()
    finally:
        await server.stop(0)
