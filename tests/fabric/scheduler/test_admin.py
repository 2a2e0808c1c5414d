"""AdminService over sockets, and the start and stop of a scheduler."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from google.protobuf.duration_pb2 import Duration
from support.scheduler.scheduler_harness import (
    AUDIO,
    CHAT,
    FREE,
    OMNI,
    SchedulerHarness,
    register_message,
)
from support.time_limits import WITHIN_S

from duplane.fabric import process
from duplane.fabric.channel import open_channel
from duplane.fabric.errors import FabricError, Reason, from_rpc
from duplane.fabric.v1 import admin_pb2, registry_pb2, registry_pb2_grpc
from duplane.scheduler.service import serve
from duplane.scheduler.settings import SchedulerSettings

pytestmark = pytest.mark.usefixtures("every_store")


@pytest.mark.timing
async def test_lists_show_workers_leases_and_tickets() -> None:
    async with SchedulerHarness.running(ticket_limit=17) as harness:
        operator = await harness.operator()
        later, worker = (
            await harness.worker("w2", pool="p"),
            await harness.worker("w1", slot_count=1),
        )
        assert later.registered.worker_epoch < worker.registered.worker_epoch
        granted = await (await harness.caller(session_id="s1")).granted()
        await worker.claim(granted)
        await worker.report(unit_count=5, memory_used_bytes=1 << 20)
        first = await harness.caller(tenant_id="acme")
        await first.stands(1)
        second = await harness.caller()
        await second.stands(2)
        await operator.until(lambda seen: seen.workers["w1"].report.unit_count == 5)

        workers = (await operator.stub.ListWorkers(admin_pb2.ListWorkersRequest())).workers
        assert [one.worker.worker_id for one in workers] == ["w1", "w2"]
        assert workers[0].report.memory_used_bytes == 1 << 20
        assert workers[0].worker.slots[0].lease_id == granted.lease_id
        assert workers[0].worker_epoch == worker.registered.worker_epoch
        assert not workers[1].HasField("report")

        (lease,) = (await operator.stub.ListLeases(admin_pb2.ListLeasesRequest())).leases
        assert lease.claims.SerializeToString() == granted.lease.claims
        assert lease.is_claimed
        held = lease.held_duration.ToTimedelta() + lease.estimated_remaining.ToTimedelta()
        assert held.total_seconds() == pytest.approx(120)

        listed = await operator.stub.ListTickets(admin_pb2.ListTicketsRequest())
        assert listed.ticket_limit == 17
        assert [one.ticket_id for one in listed.tickets] == [first.ticket_id, second.ticket_id]
        assert [one.position for one in listed.tickets] == [1, 2]
        assert {one.kind for one in listed.tickets} == {AUDIO}
        assert [one.tenant_id for one in listed.tickets] == ["acme", ""]
        waits = [one.estimated_wait.ToTimedelta().total_seconds() for one in listed.tickets]
        assert 119 < waits[0] < 120
        assert 239 < waits[1] < 240


async def test_lists_come_in_pages() -> None:
    async with SchedulerHarness.running() as harness:
        operator = await harness.operator()
        await harness.worker("w1", slot_count=2)
        await harness.worker("w2", slot_count=1)
        granted = [await (await harness.caller()).granted() for _ in range(3)]
        tickets = [caller.ticket_id for caller in await harness.queue(3)]
        workers, token = list[str](), ""
        while token or not workers:
            worker_page = await operator.stub.ListWorkers(
                admin_pb2.ListWorkersRequest(page_size=1, page_token=token)
            )
            workers += [one.worker.worker_id for one in worker_page.workers]
            token = worker_page.next_page_token
        leases, token = list[str](), ""
        while token or not leases:
            lease_page = await operator.stub.ListLeases(
                admin_pb2.ListLeasesRequest(page_size=1, page_token=token)
            )
            leases += [one.claims.lease_id for one in lease_page.leases]
            token = lease_page.next_page_token
        listed, token = list[str](), ""
        while token or not listed:
            ticket_page = await operator.stub.ListTickets(
                admin_pb2.ListTicketsRequest(page_size=2, page_token=token)
            )
            listed += [one.ticket_id for one in ticket_page.tickets]
            token = ticket_page.next_page_token
        assert workers == ["w1", "w2"]
        assert leases == [one.lease_id for one in granted]
        assert listed == tickets


async def test_leases_of_one_session_are_listed_with_the_address_of_their_worker() -> None:
    async with SchedulerHarness.running() as harness:
        operator = await harness.operator()
        await harness.worker(slot_count=3)
        granted = [await (await harness.caller(session_id=f"s{n % 2}")).granted() for n in range(3)]
        request = admin_pb2.ListLeasesRequest(session_id="s0")
        listed = (await operator.stub.ListLeases(request)).leases
        assert [one.claims.lease_id for one in listed] == [granted[0].lease_id, granted[2].lease_id]
        assert {one.worker_address for one in listed} == {granted[0].worker_address}
        request = admin_pb2.ListLeasesRequest(session_id="s0", page_size=1)
        listed = (await operator.stub.ListLeases(request)).leases
        assert [one.claims.lease_id for one in listed] == [granted[2].lease_id]  # the latest
        request = admin_pb2.ListLeasesRequest(session_id="s2")
        assert not (await operator.stub.ListLeases(request)).leases


async def test_invalid_page_is_refused() -> None:
    async with SchedulerHarness.running() as harness:
        operator = await harness.operator()
        for field, request in {
            "page_size": admin_pb2.ListTicketsRequest(page_size=-1),
            "page_token": admin_pb2.ListTicketsRequest(page_token="x" * 600),
        }.items():
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await operator.stub.ListTickets(request)
            error = from_rpc(refused.value)
            assert (error.reason, error.field) == (Reason.INVALID_FIELD, field)


async def test_watch_streams_every_step_of_a_lease() -> None:
    async with SchedulerHarness.running() as harness:
        operator = await harness.operator()
        assert operator.steps[0].HasField("snapshot")
        worker = await harness.worker()
        granted = await (await harness.caller()).granted()
        await worker.claim(granted)
        await worker.finish(0)
        await operator.until(lambda seen: len(seen.steps) == 8)
        assert operator.workers["w"].worker.slots[0].state == FREE
        kinds = [step.WhichOneof("event") for step in operator.steps[1:]]
        # The request was granted immediately, so it never had a ticket.
        assert kinds[:2] == ["worker", "lease"]
        assert sorted(kinds[2:4]) == ["lease", "worker"]  # claimed, occupied
        assert sorted(kinds[4:6]) == ["removed_lease_id", "worker"]  # cleaning
        assert kinds[6:] == ["worker"]  # free


async def test_watch_streams_positions_that_change() -> None:
    async with SchedulerHarness.running() as harness:
        operator = await harness.operator()
        first, second = await harness.queue(2)
        await first.vanish()
        await operator.until(lambda seen: list(seen.tickets) == [second.ticket_id])
        await operator.until(lambda seen: seen.tickets[second.ticket_id].position == 1)


async def test_late_watcher_sees_what_is_there() -> None:
    async with SchedulerHarness.running() as harness:
        worker = await harness.worker()
        granted = await (await harness.caller()).granted()
        await worker.claim(granted)
        (waiting,) = await harness.queue(1)
        operator = await harness.operator()
        assert list(operator.workers) == ["w"]
        assert list(operator.leases) == [granted.lease_id]
        assert list(operator.tickets) == [waiting.ticket_id]


async def test_cancelled_ticket_ends_its_call_and_the_next_moves_up() -> None:
    async with SchedulerHarness.running() as harness:
        operator = await harness.operator()
        first, second = await harness.queue(2)
        await operator.cancel(first.ticket_id)
        assert (await first.refused()).reason is Reason.TICKET_CANCELLED
        await second.stands(1)


@pytest.mark.parametrize(
    ("ticket_id", "reason"),
    [("q_0000000000000001", Reason.UNKNOWN_TICKET), ("nonsense", Reason.INVALID_FIELD)],
)
async def test_ticket_that_does_not_wait_cannot_be_cancelled(
    ticket_id: str, reason: Reason
) -> None:
    async with SchedulerHarness.running() as harness:
        with pytest.raises(FabricError) as refused:
            await (await harness.operator()).cancel(ticket_id)
        assert (refused.value.reason, refused.value.field) == (reason, "ticket_id")


def seconds(duration: Any) -> float:
    return duration.ToTimedelta().total_seconds()


@pytest.mark.timing
async def test_estimates_can_be_read_and_changed_and_callers_get_the_new_ones() -> None:
    async with SchedulerHarness.running() as harness:
        operator = await harness.operator()
        told = (await operator.stub.GetEstimates(admin_pb2.GetEstimatesRequest())).estimates
        assert {hold.kind: seconds(hold.base_duration) for hold in told.holds} == {
            AUDIO: 120,
            OMNI: 90,
            CHAT: 15,
        }
        assert (told.smoothing, told.needed_sample_count) == (0.3, 3)
        assert not any(hold.HasField("mean_duration") for hold in told.holds)

        base = admin_pb2.BaseHold(kind=AUDIO, base_duration=Duration(seconds=7))
        changed = await operator.stub.UpdateEstimates(
            admin_pb2.UpdateEstimatesRequest(bases=[base], smoothing=0.5)
        )
        assert {hold.kind: seconds(hold.base_duration) for hold in changed.estimates.holds} == {
            AUDIO: 7,
            OMNI: 90,
            CHAT: 15,
        }
        assert changed.estimates.smoothing == 0.5
        worker = await harness.worker()
        granted = await (await harness.caller()).granted()
        await worker.claim(granted)
        await harness.queue(2)
        listed = await operator.stub.ListTickets(admin_pb2.ListTicketsRequest())
        waits = [seconds(one.estimated_wait) for one in listed.tickets]
        assert 5 < waits[0] < 7 < waits[1] < 14

        await worker.finish(0)
        await operator.until(lambda seen: granted.lease_id not in seen.leases)
        told = (await operator.stub.GetEstimates(admin_pb2.GetEstimatesRequest())).estimates
        audio = next(hold for hold in told.holds if hold.kind == AUDIO)
        assert audio.sample_count == 1
        assert 0 < seconds(audio.mean_duration) < WITHIN_S


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        ({"smoothing": 0.0}, "smoothing"),
        ({"smoothing": 1.1}, "smoothing"),
        ({"smoothing": float("nan")}, "smoothing"),
        ({"bases": [{"kind": AUDIO}]}, "bases[0].base_duration"),
        ({"bases": [{"base_duration": {"seconds": 1}}]}, "bases[0].kind"),
        (
            {"bases": [{"kind": AUDIO, "base_duration": {"seconds": 86_401}}], "smoothing": 0.5},
            "bases[0].base_duration",
        ),
    ],
)
async def test_invalid_estimates_are_refused_and_change_nothing(
    request_: dict[str, Any], field: str
) -> None:
    async with SchedulerHarness.running() as harness:
        stub = (await harness.operator()).stub
        before = (await stub.GetEstimates(admin_pb2.GetEstimatesRequest())).estimates
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.UpdateEstimates(admin_pb2.UpdateEstimatesRequest(**request_))
        error = from_rpc(refused.value)
        assert (error.reason, error.field) == (Reason.INVALID_FIELD, field)
        assert (await stub.GetEstimates(admin_pb2.GetEstimatesRequest())).estimates == before


async def test_stopping_ends_every_wait_within_its_bound() -> None:
    async with SchedulerHarness.running(stop_timeout_s=4 * WITHIN_S) as harness:
        worker = await harness.worker()
        await (await harness.caller()).granted()
        (waiting,) = await harness.queue(1)
        operator = await harness.operator()
        async with asyncio.timeout(WITHIN_S):
            await harness.stop()
        assert (await waiting.refused()).reason is Reason.UNAVAILABLE
        assert (await worker.ended()).reason is Reason.UNAVAILABLE
        with pytest.raises(FabricError) as ended:
            await operator.until(lambda seen: False)
        assert ended.value.reason is Reason.UNAVAILABLE


async def test_serve_announces_itself_and_returns_on_shutdown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    key = Ed25519PrivateKey.generate()
    pem = tmp_path / "key.pem"
    pem.touch(0o600)
    pem.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    shutdown, announce, announced = process.Shutdown(), process.announce, asyncio.Event()

    def announce_and_tell(role: str, address: str) -> None:
        announce(role, address)
        announced.set()

    monkeypatch.setattr(process, "announce", announce_and_tell)
    settings = SchedulerSettings(listen="127.0.0.1:0", signing_key=pem)
    async with asyncio.timeout(WITHIN_S), asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(serve(settings, shutdown))
        await announced.wait()
        ready, role, address = capsys.readouterr().out.split()
        assert (ready, role) == (process.READY, "scheduler")
        async with open_channel(address) as channel:
            workers = registry_pb2_grpc.RegistryServiceStub(channel)
            attached = workers.Attach()
            await attached.write(registry_pb2.AttachRequest(register=register_message()))
            told = await attached.read()
            assert isinstance(told, registry_pb2.AttachResponse)
            told_keys = told.registered.verification_keys
            assert [one.public_key for one in told_keys] == [key.public_key().public_bytes_raw()]
            shutdown.drain()
            await serving
            attached.cancel()
