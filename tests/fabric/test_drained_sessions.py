"""Sessions whose worker drains or is slow for a while, with real processes and a scripted model.

The events of each client equal those of an undisturbed session.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import pytest
from support.fabric.real_fabric import RealFabric
from support.fabric.talker import WAIT_S, Talker, begun, talking, until_free
from support.time_limits import until
from support.tools.command import run_command

pytestmark = pytest.mark.timing

WORKERS = 4
FREE = WORKERS * 2
UNITS = 24  # a worker needs six times REBUILD_S for so many past units
REBUILD_S = 0.1
UNIT_S = 0.25  # time between two units, so that rebuilds are faster than the sessions
MOST_UNITS = 400  # of one session
LISTEN, SPEECH = "response.listen", "response.output_audio.delta"


@pytest.fixture(scope="module")
async def fabric() -> AsyncGenerator[RealFabric]:
    """A fabric of four workers with two slots each. A worker that ends is started again."""
    environment = {
        "DUPLANE_WORKERS": str(WORKERS),
        "DUPLANE_CONTINUITY": "worker",
        "DUPLANE_FAILOVER_S": str(WAIT_S),
        "DUPLANE_SCRIPTED_REBUILD_S": str(REBUILD_S),
    }
    async with RealFabric.starting("scripted", **environment) as fabric:
        yield fabric


@pytest.fixture(scope="module")
async def undisturbed(fabric: RealFabric) -> list[dict[str, Any]]:
    """The events of a long session that nothing disturbs."""
    async with talking(fabric, FREE) as client:
        for _ in range(MOST_UNITS):
            await client.exchange()
    return client.events


def check(client: Talker, undisturbed: Sequence[dict[str, Any]]) -> None:
    """Assert that the client got the events of an undisturbed session of the same length."""
    print(f"longest answer {client.longest_s:.3f} s")
    assert client.events == [*undisturbed[: len(client.events) - 1], undisturbed[-1]]


@contextlib.asynccontextmanager
async def speaking(fabric: RealFabric, last: str = LISTEN) -> AsyncGenerator[Talker]:
    """Send UNITS units, and more until an answer is `last`; then yield the client."""
    async with talking(fabric, FREE - 2) as client:
        for _ in range(UNITS - 1):
            await client.exchange()
        while (await client.exchange())["type"] != last:
            pass
        yield client


@dataclass(frozen=True)
class Disturbed:
    """A session whose worker a test disturbs."""

    client: Talker
    moves: Moves
    worker: psutil.Process


@contextlib.asynccontextmanager
async def disturbed(
    fabric: RealFabric, undisturbed: Sequence[dict[str, Any]], last: str = LISTEN
) -> AsyncGenerator[Disturbed]:
    """Disturb a session as in `speaking`; at the end assert that its client noticed nothing."""
    async with speaking(fabric, last) as client:
        yield Disturbed(client, Moves(fabric), await client.worker())
    check(client, undisturbed)


async def exchange_until(is_true: Callable[[], bool], *clients: Talker) -> None:
    """Let clients exchange units until `is_true()`."""
    async with asyncio.timeout(WAIT_S):
        while not is_true():
            await asyncio.gather(asyncio.sleep(UNIT_S), *(one.exchange() for one in clients))


class Moves:
    """Counts log lines of the edge about moves, from the creation of this object on."""

    def __init__(self, fabric: RealFabric) -> None:
        self._log, self._begin = fabric.log, len(fabric.log)

    def count(self, text: str) -> int:
        return sum(f"the session {text}" in line for line in self._log[self._begin :])

    async def until_continued(self) -> None:
        """Wait until the edge has written that a session continues; its client may know earlier."""

        async def has_continued() -> bool:
            return self.count("continues") > 0

        await until(has_continued, WAIT_S)

    async def until_begun(self, cause: str) -> None:
        async def has_begun() -> bool:
            lines = self._log[self._begin :]
            return any(" leave" in line and f": {cause} " in line for line in lines)

        await until(has_begun, WAIT_S)


async def until_ended(worker: psutil.Process) -> None:
    await asyncio.to_thread(worker.wait, WAIT_S)


@pytest.mark.parametrize("last", [LISTEN, SPEECH])
async def test_worker_that_is_terminated_ends_without_a_lost_unit(
    fabric: RealFabric, undisturbed: list[dict[str, Any]], last: str
) -> None:
    async with disturbed(fabric, undisturbed, last) as play:
        play.worker.terminate()
        await exchange_until(lambda: play.moves.count("continues") == 1, play.client)
        await until_ended(play.worker)
        await play.client.exchange()


async def test_duplane_drain_frees_the_worker(
    fabric: RealFabric, undisturbed: list[dict[str, Any]]
) -> None:
    async with disturbed(fabric, undisturbed) as play:
        rows = (await fabric.get("/workers"))[1]["workers"]
        ids = [row["worker_id"] for row in rows]
        (worker_id,) = [one for one in ids if f"-{play.worker.pid}-" in one]
        command = ("drain", worker_id, "--scheduler", fabric.scheduler)
        assert (await asyncio.to_thread(run_command, *command))[0] == 0
        await exchange_until(lambda: play.moves.count("continues") == 1, play.client)
        assert await play.client.worker() != play.worker
        play.worker.terminate()
        await until_ended(play.worker)
        await play.client.exchange()


async def test_draining_worker_that_is_killed_during_the_rebuild(
    fabric: RealFabric, undisturbed: list[dict[str, Any]]
) -> None:
    async with disturbed(fabric, undisturbed) as play:
        play.worker.terminate()
        await play.moves.until_begun("drain")
        await play.client.exchange()
        play.worker.kill()
        await play.client.exchange()
        await play.moves.until_continued()
        begun = play.moves.count("prepares to leave") + play.moves.count("leaves")
        assert (play.moves.count("continues"), begun) == (1, 1)


async def test_client_that_leaves_during_the_preparation_leaves_no_slot_in_use(
    fabric: RealFabric, undisturbed: list[dict[str, Any]]
) -> None:
    async with disturbed(fabric, undisturbed) as play:
        play.worker.terminate()
        await play.moves.until_begun("drain")
        await play.client.exchange()
    await until_ended(play.worker)
    assert play.moves.count("continues") == 0


async def test_two_workers_drain_at_once(
    fabric: RealFabric, undisturbed: list[dict[str, Any]]
) -> None:
    async with disturbed(fabric, undisturbed) as play:
        await until_free(fabric, FREE - 1, lease_count=1)
        roles = psutil.Process(fabric.process.pid).children()
        other = next(one for one in roles if "worker" in one.cmdline() and one != play.worker)
        play.worker.terminate()
        other.terminate()
        await exchange_until(lambda: play.moves.count("continues") >= 1, play.client)
        for ended in (play.worker, other):
            await until_ended(ended)
        await play.client.exchange()


async def test_worker_that_hangs_for_a_moment_keeps_the_session(
    fabric: RealFabric, undisturbed: list[dict[str, Any]]
) -> None:
    async with disturbed(fabric, undisturbed) as play:
        play.worker.suspend()
        await play.client.send_unit()
        await play.moves.until_begun("overdue")
        play.worker.resume()
        await play.client.receive()
        assert await play.client.worker() == play.worker
        await play.client.exchange()
        assert play.moves.count("continues") == 0


async def test_session_leaves_a_worker_that_hangs_before_it_is_known_to_be_lost(
    fabric: RealFabric, undisturbed: list[dict[str, Any]]
) -> None:
    async with disturbed(fabric, undisturbed) as play:
        play.worker.suspend()
        await play.client.exchange()
        play.worker.resume()
        await play.moves.until_continued()
        assert play.moves.count("continues") == 1
        assert await play.client.worker() != play.worker
        await play.client.exchange()


@contextlib.asynccontextmanager
async def crowd(fabric: RealFabric, count: int) -> AsyncGenerator[list[Talker]]:
    """Hold several sessions, each with UNITS units."""
    await until_free(fabric, FREE)
    async with contextlib.AsyncExitStack() as stack:
        clients = [await begun(fabric, stack) for _ in range(count)]
        for _ in range(UNITS):
            await asyncio.gather(*(client.exchange() for client in clients))
        yield clients
        for client in clients:
            await client.end()
    await until_free(fabric, 0)


async def test_sessions_stay_at_a_draining_worker_until_a_slot_is_free(
    fabric: RealFabric, undisturbed: list[dict[str, Any]]
) -> None:
    async with crowd(fabric, FREE) as clients:
        moves, worker = Moves(fabric), fabric.role("worker")
        worker.terminate()
        await moves.until_begun("drain")
        for _ in range(5):
            await asyncio.gather(*(client.exchange() for client in clients))
        assert moves.count("continues") == 0
        assert worker.is_running()
        for client in clients[: FREE // 2]:
            await client.end()
            check(client, undisturbed)
        del clients[: FREE // 2]
        await exchange_until(lambda: not worker.is_running(), *clients)
    for client in clients:
        check(client, undisturbed)


async def test_rolling_restart_of_all_workers_loses_no_session(
    fabric: RealFabric, undisturbed: list[dict[str, Any]]
) -> None:
    async with crowd(fabric, FREE - 2) as clients:
        roles = psutil.Process(fabric.process.pid).children()
        workers = [role for role in roles if "worker" in role.cmdline()]
        assert len(workers) == WORKERS
        for worker in workers:
            worker.terminate()
            await exchange_until(lambda worker=worker: not worker.is_running(), *clients)
            restarted = asyncio.ensure_future(until_free(fabric, 2, lease_count=len(clients)))
            await exchange_until(restarted.done, *clients)
            await restarted
    for client in clients:
        check(client, undisturbed)


async def test_worker_waits_for_a_session_that_cannot_move() -> None:
    """The journal of the session has exceeded its bound, so no other worker can continue it."""
    environment = {"DUPLANE_WORKERS": "2", "DUPLANE_JOURNAL_BYTES": "100000"}
    async with RealFabric.starting("scripted", **environment) as fabric:

        async def cannot_move() -> bool:
            rows = (await fabric.get("/workers"))[1]["workers"]
            return any(session["cannot_move"] for row in rows for session in row["sessions"])

        async def has_said_so() -> bool:
            return any("cannot move to another worker" in line for line in fabric.log)

        async with talking(fabric, 2) as client:
            await client.exchange()
            assert not await cannot_move()
            for _ in range(4):
                await client.exchange()
            await until(cannot_move, WAIT_S)
            assert (await fabric.status())["edge_unmovable_session_count"] == 1
            worker = await client.worker()
            worker.terminate()
            await until(has_said_so, WAIT_S)
            for _ in range(4):
                await client.exchange()
            assert await client.worker() == worker
        await until_ended(worker)
        assert sum("can no longer move" in line for line in fabric.log) == 1
        assert not any("leaves worker" in line or "to leave worker" in line for line in fabric.log)
