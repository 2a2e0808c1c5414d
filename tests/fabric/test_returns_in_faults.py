"""Clients that return to their sessions while something else fails: real processes.

`tests/README.md` lists the tests of each fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncGenerator
from dataclasses import replace

import orjson
import pytest
from support.edge.returning_client import SAMPLES, SPEAKERS
from support.fabric.mixed_fabric import MixedFabric, Server
from support.fabric.returning_callers import SLOTS, Caller, Fabric
from support.time_limits import WITHIN_S, until

WORKERS = 2
ALL_SLOTS = WORKERS * SLOTS
HOLD_S = 0.5  # of edges that end their sessions' slots early
LATE_S = 4.0
"""Limit of the time from the end of HOLD_S to the grant of a slot, on a loaded machine."""
LATER = 100  # clients that wait, too
RACES = 20
RACES_OF_A_SESSION = 4  # so that none is refused because of too many returns
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
async def fabric() -> AsyncGenerator[Fabric]:
    async with MixedFabric.starting({}) as processes:
        scheduler = await processes.start("scheduler", is_former=False)
        fabric = Fabric(processes, scheduler)
        await asyncio.gather(add_worker(fabric), add_worker(fabric))
        await asyncio.gather(fabric.add_edge(), fabric.add_edge())
        yield fabric


async def add_worker(fabric: Fabric) -> Server:
    return await fabric.add_worker("--scripted-rebuild-s", "0.5")


@pytest.fixture
async def caller(fabric: Fabric) -> AsyncGenerator[Caller]:
    """Yield a client. Afterwards there are two workers again, and no slot may be used."""
    async with contextlib.AsyncExitStack() as sockets:
        yield Caller(SPEAKERS["b"], sockets)
    while sum(one.process.returncode is None for one in fabric.workers) < WORKERS:
        await add_worker(fabric)
    await fabric.all_free(fabric.edges[0], ALL_SLOTS)


async def finish(caller: Caller, count: int) -> None:
    """End a session that must have heard so many units, each once and in order."""
    await caller.end()
    assert [event["unit"] for event in caller.heard if event["part"] == 0] == list(range(count))
    assert caller.heard[-1]["next_sample"] == count * SAMPLES


async def lose_socket(fabric: Fabric, edge: Server, caller: Caller) -> None:
    """Reset the connection, and wait until the edge has noticed it."""
    await caller.lose()
    await fabric.status(edge)  # it comes after the reset


async def test_sound_that_was_not_sent_when_the_edge_was_killed_is_asked_for(
    fabric: Fabric, caller: Caller
) -> None:
    former, other = await fabric.add_edge(), fabric.edges[0]
    await caller.begin(former)
    await caller.units(3)
    await caller.send(caller.speaker.append)
    await (await caller.socket.ping())
    await caller.until_unit(3)
    del caller.heard[-1]  # the answer was lost with the edge
    former.process.send_signal(signal.SIGSTOP)
    await caller.send(caller.speaker.append)
    await former.kill()
    assert (await caller.come_back(other))["next_sample"] == 4 * SAMPLES
    await caller.until_unit(3)
    await caller.units(2)
    await finish(caller, 6)


async def test_one_of_two_edges_that_ask_at_once_goes_on(fabric: Fabric, caller: Caller) -> None:
    edges = fabric.edges[:2]
    for number in range(RACES):
        if number % RACES_OF_A_SESSION == 0:
            if number:
                await finish(caller, 1 + RACES_OF_A_SESSION)
            caller = Caller(caller.speaker, caller.sockets)
            await caller.begin(edges[number % 2])
            await caller.units(1)
        caller = await race(edges, caller)
        await caller.units(1)
        assert len(await fabric.leases(caller)) == 1
    await finish(caller, 1 + RACES_OF_A_SESSION)


async def race(edges: list[Server], caller: Caller) -> Caller:
    """Return to both edges at once. Return the client that has the session at the end."""
    rivals = [replace(caller, client=None, heard=list(caller.heard)) for _ in edges]
    while True:
        answers = await asyncio.gather(*map(Caller.ask, rivals, edges))
        found = [
            rival
            for rival, answer in zip(rivals, answers, strict=True)
            if answer["type"] == "session.resumed"
        ]
        if found:
            break
    if len(found) == 1:
        return found[0]
    replaced = [asyncio.create_task(rival.until("session.replaced")) for rival in found]
    async with asyncio.timeout(WITHIN_S):
        await asyncio.wait(replaced, return_when=asyncio.FIRST_COMPLETED)
    (winner,) = (rival for rival, task in zip(found, replaced, strict=True) if not task.done())
    for task in replaced:
        task.cancel()
    await asyncio.wait(replaced)
    return winner


async def test_session_whose_worker_dies_while_its_client_is_away(
    fabric: Fabric, caller: Caller
) -> None:
    edge = fabric.edges[0]
    await caller.begin(edge)
    await caller.units(3)
    worker = await fabric.worker_of(caller)
    await lose_socket(fabric, edge, caller)
    await worker.kill()

    async def has_no_slot() -> bool:
        return not await fabric.leases(caller)

    await until(has_no_slot, WITHIN_S)  # it does not move without its client
    # Only its own edge has the conversation now.
    while "resume_busy" in (told := orjson.dumps(await caller.ask(fabric.edges[1])).decode()):
        pass
    assert "resume_lost" in told
    assert (await caller.come_back(edge))["next_sample"] == 3 * SAMPLES
    await caller.units(2)
    await finish(caller, 5)


@pytest.mark.parametrize("is_drained", [False, True], ids=["same edge", "other edge"])
async def test_client_returns_while_its_session_moves(
    fabric: Fabric, caller: Caller, *, is_drained: bool
) -> None:
    await caller.begin(fabric.edges[0])
    await caller.units(3)
    former = await fabric.worker_of(caller)
    if is_drained:
        former.process.terminate()  # it has the session until the next worker has it
    else:
        await former.kill()

    async def has_next_worker() -> bool:
        return any(one != former.address for one in await fabric.leases(caller))

    await until(has_next_worker, WITHIN_S)
    await caller.send(caller.speaker.append)
    await caller.lose()
    answer = await caller.come_back(fabric.edges[int(is_drained)])
    if answer["next_sample"] == 3 * SAMPLES:
        await caller.send(caller.speaker.append)  # it was lost with the socket
    await caller.until_unit(3)
    await caller.units(2)
    async with asyncio.timeout(WITHIN_S):
        await former.process.wait()
    await finish(caller, 6)


async def test_client_of_a_worker_that_drains_returns_to_another_edge(
    fabric: Fabric, caller: Caller
) -> None:
    former, other = fabric.edges[:2]
    await caller.begin(former)
    await caller.units(3)
    worker = await fabric.worker_of(caller)
    await lose_socket(fabric, former, caller)
    worker.process.terminate()
    assert (await caller.come_back(other))["next_sample"] == 3 * SAMPLES
    await caller.units(1)
    async with asyncio.timeout(WITHIN_S):
        assert await worker.process.wait() == 0
    await caller.units(1)
    await finish(caller, 5)


async def test_token_works_again_at_each_edge_if_answers_are_lost(
    fabric: Fabric, caller: Caller
) -> None:
    await caller.begin(fabric.edges[0])
    await caller.units(2)
    told = caller.said
    del caller.heard[1:]
    await caller.lose()
    for number in range(6):
        await caller.connect(fabric.edges[(number + 1) % 2])
        await caller.send(caller.request())
        if number % 3:  # else the edge is perhaps still asked
            await caller.socket.recv()
        await caller.lose()
    await caller.come_back(fabric.edges[1])
    await caller.until_unit(1)
    assert caller.said[: len(told)] == told
    await caller.units(1)
    await finish(caller, 3)


async def test_return_that_the_worker_does_not_answer_leaves_the_live_socket_alone(
    fabric: Fabric, caller: Caller
) -> None:
    first, second = fabric.edges[:2]
    await caller.begin(first)
    await caller.units(2)
    rival = replace(caller, client=None, heard=list(caller.heard))
    worker = await fabric.worker_of(caller)
    worker.process.send_signal(signal.SIGSTOP)
    try:
        answer = await rival.ask(second)
    finally:
        worker.process.send_signal(signal.SIGCONT)
    assert b"resume_busy" in orjson.dumps(answer), answer
    await caller.units(2)
    await finish(caller, 4)


@pytest.mark.timing
@pytest.mark.parametrize("is_killed", [False, True], ids=["sockets", "edge"])
async def test_slots_of_clients_that_stay_away_go_to_those_that_wait(
    fabric: Fabric, caller: Caller, *, is_killed: bool
) -> None:
    former, other = await fabric.add_edge("--hold-s", str(HOLD_S)), fabric.edges[0]
    holders = [Caller(caller.speaker, caller.sockets) for _ in range(ALL_SLOTS)]
    waiting = [Caller(caller.speaker, caller.sockets) for _ in range(ALL_SLOTS)]
    for holder in holders:
        await holder.begin(former)
        await holder.units(1)
    for one in waiting:
        await one.connect(other)
        await one.until("session.queued")
    lost_s = time.monotonic()
    if is_killed:
        await former.kill()
    else:
        for holder in holders:
            await holder.lose()
    for one in waiting:
        await one.until("session.queue_done")
        assert HOLD_S - 0.1 < time.monotonic() - lost_s < HOLD_S + LATE_S
    for one in waiting:
        await one.send(one.speaker.settings)
        await one.until(one.speaker.ready)
        await one.end()
    await former.kill()


async def test_waiting_client_whose_edge_is_killed_keeps_its_position(
    fabric: Fabric, caller: Caller
) -> None:
    former, other = await fabric.add_edge(), fabric.edges[0]
    holders = [Caller(caller.speaker, caller.sockets) for _ in range(ALL_SLOTS)]
    later = [Caller(caller.speaker, caller.sockets) for _ in range(LATER)]
    for holder in holders:
        await holder.begin(other)
    first = Caller(caller.speaker, caller.sockets)
    await first.connect(other)
    await first.until("session.queued")
    await caller.connect(former)
    await caller.send(caller.speaker.settings)
    while "queue_token" not in (event := await caller.read()):
        pass
    assert event["position"] == 2
    for one in later:
        await one.connect(other)
        await one.until("session.queued")
    await former.kill()
    await caller.connect(other)
    payload = {**caller.speaker.settings["payload"], "queue_token": event["queue_token"]}
    await caller.send({**caller.speaker.settings, "payload": payload})
    while (place := await caller.read())["position"] != 2:
        pass
    assert place["queue_length"] == 2 + LATER
    await holders[0].end()
    await first.until("session.queue_done")
    await holders[1].end()
    await caller.until(caller.speaker.ready)
    for one in (first, *later, *holders[2:]):
        await one.lose()
    await caller.end()
