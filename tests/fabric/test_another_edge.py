"""Calls that go on at another edge: real edges, workers and a scheduler, which are killed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import orjson
import pytest
from support.edge.returning_client import SAMPLES, SPEAKERS
from support.fabric.mixed_fabric import MixedFabric
from support.fabric.returning_callers import SLOTS, Caller, Fabric
from support.time_limits import WITHIN_S


@pytest.fixture(scope="module")
async def fabric() -> AsyncGenerator[Fabric]:
    async with MixedFabric.starting({}) as processes:
        scheduler = await processes.start("scheduler", is_former=False)
        fabric = Fabric(processes, scheduler)
        await asyncio.gather(fabric.add_worker(), fabric.add_edge(), fabric.add_edge())
        yield fabric


@pytest.fixture
async def sockets() -> AsyncGenerator[contextlib.AsyncExitStack]:
    async with contextlib.AsyncExitStack() as stack:
        yield stack


@pytest.fixture
def caller(sockets: contextlib.AsyncExitStack) -> Caller:
    return Caller(SPEAKERS["b"], sockets)


@pytest.mark.slow
async def test_calls_go_on_at_another_edge_when_their_edge_is_killed(
    fabric: Fabric, sockets: contextlib.AsyncExitStack
) -> None:
    former, other = await fabric.add_edge(), fabric.edges[0]
    undisturbed = [Caller(speaker, sockets) for speaker in SPEAKERS.values()]
    callers = [Caller(speaker, sockets) for speaker in SPEAKERS.values()]
    for caller in undisturbed:
        await caller.begin(other)
        await caller.units(6)
        await caller.end()
    for caller in callers:
        await caller.begin(former)
        await caller.units(3)
    await former.kill()
    for number, caller in enumerate(callers):
        told = caller.said
        del caller.heard[number:]  # as if the last events were lost
        answer = await caller.come_back(other)
        assert (answer["unit"], answer["next_sample"]) == (2, 3 * SAMPLES)
        while len(caller.heard) < len(told):
            await caller.read()
        assert caller.said[: len(told)] == told
        assert all(event["replayed"] for event in caller.heard[number : len(told)])
        await caller.units(3)
        await caller.end()
    assert [caller.said for caller in callers] == [caller.said for caller in undisturbed]
    await fabric.all_free(other)


@pytest.mark.slow
async def test_former_socket_is_replaced_while_its_edge_lives(
    fabric: Fabric, caller: Caller
) -> None:
    first, second = fabric.edges[:2]
    await caller.begin(first)
    await caller.units(2)
    for edge in (second, first, second):
        former = caller.socket
        await caller.come_back(edge)
        async with asyncio.timeout(WITHIN_S):
            events = [orjson.loads(message) async for message in former]
        assert events[-1]["type"] == "session.replaced"
        await caller.units(1)
    assert [event["unit"] for event in caller.heard if event["part"] == 0] == [0, 1, 2, 3, 4]
    await caller.end()
    await fabric.all_free(second)


@pytest.mark.slow
async def test_edge_refuses_a_session_of_another_edge_with_a_wrong_token(
    fabric: Fabric, caller: Caller
) -> None:
    first, second = fabric.edges[:2]
    await caller.begin(first)
    await caller.units(1)
    live = caller.socket
    another = Caller(caller.speaker, caller.sockets)
    await another.begin(first)
    session_id, secret = caller.token.split(".")[0], another.token.split(".")[1]
    for changed, code in [
        ({"token": f"{session_id}.wrong"}, "resume_refused"),
        ({"token": f"{session_id}.{secret}"}, "resume_refused"),
        ({"unit": 7, "part": 0}, "resume_stale"),
        ({"token": "sess_unknown.x"}, "resume_lost"),
    ]:
        answer = await caller.ask(second, **changed)
        assert code in orjson.dumps(answer).decode(), answer
        await caller.socket.wait_closed()
        assert caller.socket.close_code == 1008
    caller.client = live  # nothing has changed for the session
    for one in (caller, another):
        await one.units(1)
        await one.end()
    await fabric.all_free(first)


@pytest.mark.slow
async def test_session_without_a_slot_is_rebuilt_by_the_other_edge(
    fabric: Fabric, caller: Caller
) -> None:
    former, other = await fabric.add_edge("--hold-s", "0.05"), fabric.edges[0]
    await caller.begin(former)
    await caller.units(3)
    await former.kill()
    await fabric.all_free(other)
    assert (await caller.come_back(other))["next_sample"] == 3 * SAMPLES
    await caller.units(2)
    assert [event["unit"] for event in caller.heard if event["part"] == 0] == [0, 1, 2, 3, 4]
    await caller.end()
    await fabric.all_free(other)


@pytest.mark.slow
async def test_session_without_a_slot_comes_before_later_clients_at_the_other_edge(
    fabric: Fabric, caller: Caller, sockets: contextlib.AsyncExitStack
) -> None:
    former, other = await fabric.add_edge("--hold-s", "0.05"), fabric.edges[0]
    await caller.begin(former)
    await caller.units(1)
    await former.kill()
    await fabric.all_free(other)
    holders = [Caller(SPEAKERS["b"], sockets) for _ in range(SLOTS)]
    for holder in holders:
        await holder.begin(other)
    later = Caller(SPEAKERS["b"], sockets)
    await later.connect(other)
    await later.until("session.queued")
    await caller.come_back(other)
    await fabric.waits(other, 2)
    await holders[0].end()
    await caller.units(1)
    await fabric.waits(other, 1)
    await caller.end()
    await later.until("session.queue_done")
    await later.send(later.speaker.settings)
    await later.until(later.speaker.ready)
    for client in (later, *holders[1:]):
        await client.end()
    await fabric.all_free(other)


@pytest.mark.slow
async def test_session_that_waits_for_a_slot_survives_the_loss_of_its_second_socket_and_edge(
    fabric: Fabric, caller: Caller, sockets: contextlib.AsyncExitStack
) -> None:
    former, second, other = await fabric.add_edge(), await fabric.add_edge(), fabric.edges[0]
    holders = [Caller(SPEAKERS["b"], sockets) for _ in range(SLOTS)]
    await caller.begin(former)
    await caller.units(2)
    for holder in holders[1:]:
        await holder.begin(other)
    await holders[0].connect(other)
    await holders[0].until("session.queued")
    await former.kill()
    await holders[0].until("session.queue_done")
    await holders[0].send(holders[0].speaker.settings)
    await holders[0].until(holders[0].speaker.ready)
    await caller.come_back(second)
    await fabric.waits(other, 1)
    await caller.lose()  # the copy is free again, also for this edge
    await caller.come_back(second)
    await fabric.waits(other, 1)
    await second.kill()
    answer = await caller.come_back(other)
    assert answer["unit"] == 1
    await fabric.waits(other, 1)
    await holders[0].end()
    await caller.units(2)
    await caller.end()
    for holder in holders[1:]:
        await holder.end()
    await fabric.all_free(other)


@pytest.mark.slow
async def test_session_whose_edge_and_worker_are_killed_is_lost(
    fabric: Fabric, caller: Caller
) -> None:
    pool = ("--pool", "other")
    edge, worker = await asyncio.gather(fabric.add_edge(*pool), fabric.add_worker(*pool))
    await caller.begin(edge)
    await caller.units(1)
    await edge.kill()
    await worker.kill()
    while "resume_busy" in (answer := orjson.dumps(await caller.ask(fabric.edges[0])).decode()):
        pass  # the scheduler still has the lease
    assert "resume_lost" in answer
