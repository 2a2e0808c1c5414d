"""Workers that callers cannot reach: they get no grants, and no caller is refused."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest
from support.fabric.plain_sessions import PlainSessions
from support.scheduler.scheduler_harness import AUDIO, CHAT, FakeWorker, SchedulerHarness
from support.time_limits import WITHIN_S

from duplane.fabric.channel import FabricServer
from duplane.fabric.client import FabricClient
from duplane.fabric.durations import to_duration
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.v1 import lease_pb2, session_pb2, session_pb2_grpc

NOWHERE = "127.0.0.1:1"  # nothing listens on this port

pytestmark = pytest.mark.usefixtures("every_store")


class Sessions(PlainSessions):
    """A worker's servicer that accepts every claim, or never answers if `is_hung`."""

    def __init__(self, *, is_hung: bool = False) -> None:
        self.is_hung = is_hung
        self.claim_count = 0

    async def Converse(  # pyright: ignore[reportIncompatibleMethodOverride]  # stubs: no async
        self, requests: AsyncIterator[session_pb2.ConverseRequest], context: Any
    ) -> AsyncIterator[session_pb2.ConverseResponse]:
        async for request in requests:
            if self.is_hung:
                await asyncio.Event().wait()
            if request.HasField("claim"):
                self.claim_count += 1
                yield session_pb2.ConverseResponse(claimed=session_pb2.Claimed())


@contextlib.asynccontextmanager
async def served(sessions: Sessions, listen: str = "127.0.0.1:0") -> AsyncGenerator[str]:
    server = FabricServer("duplane.fabric.v1.SessionService")
    session_pb2_grpc.add_SessionServiceServicer_to_server(sessions, server.grpc)
    address = await server.start(listen)
    try:
        yield address
    finally:
        await server.stop(0)


def audio_request(request_id: str = "r") -> lease_pb2.AcquireLeaseRequest:
    return lease_pb2.AcquireLeaseRequest(request_id=request_id, kind=AUDIO)


async def test_sessions_use_another_worker_when_one_cannot_be_reached() -> None:
    sessions = Sessions()
    async with (
        served(sessions) as address,
        SchedulerHarness.running() as harness,
        FabricClient([harness.address]) as client,
        asyncio.timeout(WITHIN_S),
    ):
        await harness.worker("broken", slot_count=9, address=NOWHERE)
        await harness.worker("sound", slot_count=4, address=address)
        for number in range(4):
            async with client.session(audio_request(f"r{number}")) as stream:
                assert stream.granted.worker_id == "sound"
    assert sessions.claim_count == 4


async def test_grant_that_its_caller_refuses_is_given_back_unclaimed() -> None:
    sessions = Sessions()

    def refuse(granted: lease_pb2.Granted) -> None:
        raise FabricError(Reason.UNAVAILABLE, granted.worker_id)

    async with (
        served(sessions) as address,
        SchedulerHarness.running() as harness,
        FabricClient([harness.address]) as client,
        asyncio.timeout(WITHIN_S),
    ):
        operator = await harness.operator()
        await harness.worker("sound", address=address)
        with pytest.raises(FabricError, match="sound"):
            async with client.session(audio_request(), on_granted=refuse):
                pass
        await operator.until(lambda seen: not seen.leases)
    assert sessions.claim_count == 0


async def test_session_waits_at_its_place_while_the_only_worker_cannot_be_reached() -> None:
    async with (
        SchedulerHarness.running() as harness,
        FabricClient([harness.address]) as client,
        asyncio.timeout(WITHIN_S),
    ):
        operator = await harness.operator()
        await harness.worker("broken", address=NOWHERE)
        queued: asyncio.Queue[lease_pb2.Queued] = asyncio.Queue()

        async def converse() -> str:
            async with client.session(audio_request(), queued.put) as stream:
                return stream.granted.worker_id

        async with asyncio.TaskGroup() as tasks:
            conversing = tasks.create_task(converse())
            first = await queued.get()
            await operator.until(
                lambda seen: seen.workers["broken"].is_unreachable and not seen.leases
            )
            async with served(Sessions()) as address:
                await harness.worker("sound", address=address)
                assert await conversing == "sound"
        tickets = {step.ticket.ticket_id for step in operator.steps if step.HasField("ticket")}
        assert tickets == {first.ticket_id}
        await operator.until(lambda seen: not seen.leases)


async def test_worker_is_granted_again_after_it_answers_a_health_check() -> None:
    async with SchedulerHarness.running() as harness:
        operator = await harness.operator()
        async with served(Sessions()) as address:
            pass  # the server is closed again: only its port was needed, which is now free
        await harness.worker("late", address=address)
        granted = await (await harness.caller()).granted()
        await harness.release(granted.lease_id, unreachable_worker_id="late")
        waiting = await harness.caller()
        await waiting.stands(1)
        await operator.until(lambda seen: seen.workers["late"].is_unreachable)
        async with served(Sessions(), address):
            await waiting.granted()
        await operator.until(lambda seen: not seen.workers["late"].is_unreachable)


async def test_caller_is_granted_a_worker_that_it_avoids_only_without_another() -> None:
    async with SchedulerHarness.running() as harness:
        one = await harness.worker("one", slot_count=2)
        avoiding = await harness.caller(avoided_worker_ids=["one"])
        assert (await avoiding.granted()).worker_id == "one", "there was no other worker"
        other = await harness.worker("other", slot_count=1)
        taken = await (await harness.caller(avoided_worker_ids=["one"])).granted()
        await other.claim(taken)
        avoiding = await harness.caller(avoided_worker_ids=["one"])
        await avoiding.stands(1)
        assert (await (await harness.caller()).granted()).worker_id == "one"
        await other.finish(0)
        assert (await avoiding.granted()).worker_id == "other"
        await one.vanish()


async def test_caller_gets_a_worker_that_it_avoids_after_this_worker_was_restarted() -> None:
    # No worker becomes silent, and no time limit ends, while the test waits.
    async with SchedulerHarness.running(report_interval_s=60) as harness:
        busy = await harness.worker("busy")
        await busy.claim(await (await harness.caller()).granted())
        one = await harness.worker("one")
        lost = await (await harness.caller()).granted()
        assert lost.worker_id == "one"
        avoiding = await harness.caller(
            avoided_worker_ids=["one"],
            avoided_worker_incarnations=[lost.worker_incarnation],
            avoided_duration=to_duration(60),
        )
        await avoiding.stands(1)
        await one.vanish()
        await harness.worker("one", incarnation="one/2")
        async with asyncio.timeout(WITHIN_S):  # each message ends the time limit of one `read`
            assert (await avoiding.granted()).worker_id == "one"


@pytest.mark.timing
async def test_caller_waits_only_a_limited_time_for_another_worker_than_the_one_it_avoids() -> None:
    """When `avoided_duration` is over, the caller gets the worker without any other event."""
    async with SchedulerHarness.running() as harness:
        busy = await harness.worker("busy")
        await busy.claim(await (await harness.caller()).granted())
        await harness.worker("free")
        avoided_duration = to_duration(0.3)
        avoiding = await harness.caller(
            avoided_worker_ids=["free"], avoided_duration=avoided_duration
        )
        await avoiding.stands(1)
        async with asyncio.timeout(5):
            assert (await avoiding.granted()).worker_id == "free"


@pytest.mark.timing
async def test_session_goes_to_another_worker_when_one_hangs_on_an_open_channel() -> None:
    hung, sound = Sessions(is_hung=True), Sessions()
    async with (
        served(hung) as hung_address,
        served(sound) as sound_address,
        SchedulerHarness.running(claim_timeout_s=1.0) as harness,
        FabricClient([harness.address]) as client,
        asyncio.timeout(WITHIN_S),
    ):
        await harness.worker("hung", slot_count=9, address=hung_address)
        await harness.worker("sound", address=sound_address)
        async with client.session(audio_request()) as stream:
            assert stream.granted.worker_id == "sound"


async def test_claim_of_a_worker_that_hangs_fails_with_a_reason() -> None:
    granted = lease_pb2.Granted(lease_id="l", worker_id="w")
    granted.claim_timeout.FromSeconds(1)
    async with served(Sessions(is_hung=True)) as address, FabricClient([NOWHERE]) as client:
        granted.worker_address = address
        with pytest.raises(FabricError) as failed:
            async with client.converse(granted):
                pass
    assert failed.value.reason is Reason.UNAVAILABLE


async def test_worker_without_time_to_answer_a_claim_is_not_avoided() -> None:
    busy, other = Sessions(is_hung=True), Sessions()
    async with (
        served(busy) as busy_address,
        served(other) as other_address,
        SchedulerHarness.running() as harness,
        FabricClient([harness.address]) as client,
        asyncio.timeout(WITHIN_S),
    ):
        await harness.worker("busy", slot_count=9, address=busy_address)
        await harness.worker("other", address=other_address)
        worker_ids: list[str] = []

        def on_granted(granted: lease_pb2.Granted) -> None:
            worker_ids.append(granted.worker_id)
            busy.is_hung = len(worker_ids) == 1
            if busy.is_hung:
                granted.claim_timeout.FromMilliseconds(1)

        async with client.session(audio_request(), on_granted=on_granted):
            assert worker_ids == ["busy", "busy"]


async def test_chat_that_cannot_reach_its_worker_reports_it() -> None:
    async with (
        SchedulerHarness.running() as harness,
        FabricClient([harness.address]) as client,
        asyncio.timeout(WITHIN_S),
    ):
        operator = await harness.operator()
        worker: FakeWorker = await harness.worker("broken", kinds=[CHAT], address=NOWHERE)
        request = lease_pb2.AcquireLeaseRequest(request_id="r", kind=CHAT)
        granted = await client.acquire(request)
        with pytest.raises(FabricError):
            async with client.chat(granted, session_pb2.ChatRequest()) as responses:
                await anext(responses)
        await client.release(granted.lease_id)
        await operator.until(lambda seen: seen.workers["broken"].is_unreachable)
        await worker.vanish()


async def test_reported_worker_gets_no_grants_while_it_is_checked() -> None:
    # The kernel accepts connections, and nobody reads from them.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host, port = silent.getsockname()
        async with SchedulerHarness.running() as harness:
            operator = await harness.operator()
            await harness.worker("hung", slot_count=2, address=f"{host}:{port}")
            granted = await (await harness.caller()).granted()
            await harness.release(granted.lease_id, unreachable_worker_id="hung")
            waiting = await harness.caller()
            await waiting.stands(1)
            await operator.until(lambda seen: seen.workers["hung"].is_unreachable)
            await harness.worker("sound")
            assert (await waiting.granted()).worker_id == "sound"


async def test_worker_that_has_just_answered_keeps_its_grants_although_it_is_reported_again() -> (
    None
):
    async with served(Sessions()) as address, SchedulerHarness.running() as harness:
        operator = await harness.operator()
        await harness.worker("sound", slot_count=4, address=address)
        for _ in range(4):
            granted = await (await harness.caller()).granted()
            await harness.release(granted.lease_id, unreachable_worker_id="sound")
        assert not [step for step in operator.steps if step.worker.is_unreachable]
