"""`duplane status` and `duplane drain` against a scheduler on a socket."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import signal
import socket
import sys
from collections.abc import AsyncGenerator
from typing import Any

import orjson
import pytest
from support.scheduler.scheduler_harness import (
    CHAT,
    CLEANING,
    FREE,
    FakeWorker,
    SchedulerHarness,
    slot_reports,
)
from support.time_limits import WITHIN_S
from support.tools.command import run_command

from duplane.fabric.process import EXIT_INTERRUPTED
from duplane.tools.command import CommandError
from duplane.tools.operators import draining


async def run(*arguments: str) -> tuple[int, str]:
    """Run the command in a thread, beside the scheduler of the test."""
    return await asyncio.to_thread(run_command, *arguments)


async def test_status_shows_workers_slots_leases_and_queue() -> None:
    async with SchedulerHarness.running(ticket_limit=9) as harness:
        worker = await harness.worker("w1", slot_count=2, labels={"zone": "x"}, pool="p")
        operator = await harness.operator()
        granted = await (await harness.caller(pool="p", session_id="s1")).granted()
        await worker.claim(granted)
        await (await harness.caller(pool="p", session_id="s2")).granted()
        waiting = await harness.caller(pool="p", session_id="s3", needs={"zone": "x"})
        await waiting.stands(1)
        await operator.until(lambda seen: seen.leases[granted.lease_id].is_claimed)
        await operator.until(lambda seen: seen.workers["w1"].worker.slots[0].lease_id != "")
        code, output = await run("status", "--scheduler", harness.address)
    assert code == 0
    rows = {row[0]: row[1:] for row in map(str.split, output.splitlines()) if row}
    assert rows[harness.address] == ["answers", "1", "2", "1"]
    assert rows["w1"] == ["ready", *"0011000", "p", "zone=x", "-", "127.0.0.1:1"]
    assert rows["s1"][:4] == ["w1", "0", "audio_duplex", "claimed"]
    assert rows["s2"][:4] == ["w1", "1", "audio_duplex", "granted"]
    assert rows["s3"][:4] == ["1", "audio_duplex", "p", "zone=x"]
    assert "waiting: 1 of at most 9" in output


async def test_status_says_whether_a_worker_serves() -> None:
    async with SchedulerHarness.running() as harness:
        _, output = await run("status", "--scheduler", harness.address)
        assert "workers: 0; no worker serves, so sessions wait" in output
        await harness.worker("w1", slots=slot_reports(CLEANING))
        _, output = await run("status", "--scheduler", harness.address)
        assert "workers: 1\n" in output
        await run("drain", "w1", "--scheduler", harness.address)
        _, output = await run("status", "--scheduler", harness.address)
        assert "workers: 1; no worker serves" in output


async def test_status_says_how_many_rows_it_leaves_out() -> None:
    async with SchedulerHarness.running() as harness:
        await harness.queue(3)
        _, output = await run("status", "--scheduler", harness.address, "--rows", "2")
        assert "waiting: 3 of at most 1000; 1 more are not shown" in output


async def test_status_as_json_is_whole_and_names_schedulers_that_do_not_answer() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        silent = f"127.0.0.1:{closed.getsockname()[1]}"
        async with SchedulerHarness.running() as harness:
            caller = await harness.caller(CHAT, session_id="s1")
            await caller.stands(1)
            addresses = f"{harness.address},{silent}"
            code, output = await run("status", "--json", "--scheduler", addresses)
    assert code == 0
    state = orjson.loads(output)
    assert [one["address"] for one in state["schedulers"]] == [harness.address, silent]
    assert [bool(one["failure"]) for one in state["schedulers"]] == [False, True]
    assert [one["session_id"] for one in state["tickets"]] == ["s1"]
    assert state["workers"] == []


class Watching:
    """`duplane status --watch`, running."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    @contextlib.asynccontextmanager
    async def running(cls, *arguments: str) -> AsyncGenerator[Watching]:
        command = (sys.executable, "-m", "duplane.tools", "status", "--watch", *arguments)
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        try:
            yield cls(process)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def until_ticket_count(self, count: int) -> None:
        """Read lines of JSON until the queue has this length."""
        assert self._process.stdout
        async with asyncio.timeout(2 * WITHIN_S):
            while True:
                state: dict[str, Any] = orjson.loads(await self._process.stdout.readline())
                if len(state["tickets"]) == count:
                    return

    async def interrupt(self) -> int:
        self._process.send_signal(signal.SIGINT)
        await self._process.communicate()
        assert self._process.returncode is not None
        return self._process.returncode


async def test_watched_status_follows_changes_until_it_is_interrupted() -> None:
    async with SchedulerHarness.running() as harness:
        arguments = ("--json", "--interval-s", "0.1", "--scheduler", harness.address)
        async with Watching.running(*arguments) as watching:
            await watching.until_ticket_count(0)
            await harness.queue(2)
            await watching.until_ticket_count(2)
            assert await watching.interrupt() == 0


async def test_commands_name_the_scheduler_that_cannot_be_used() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        silent = f"127.0.0.1:{closed.getsockname()[1]}"
        code, output = await run("status", "--scheduler", silent)
        assert code == 1
        assert f"no scheduler answers: {silent}: UNAVAILABLE" in output
    code, output = await run("drain", "w1", "--scheduler", "nowhere")
    assert code == 2
    assert "scheduler" in output


async def test_drained_worker_gets_no_more_sessions_and_has_no_free_slots() -> None:
    async with SchedulerHarness.running() as harness:
        worker = await harness.worker("w1", slot_count=3)
        await worker.claim(await (await harness.caller()).granted())
        code, output = await run("drain", "w1", "--scheduler", harness.address)
        assert code == 0
        assert output.startswith("worker w1 accepts no more sessions\n")
        assert all(word in output for word in ("move to other workers", "--wait", "--undo"))
        await worker.until(lambda: any(one.HasField("drain") for one in worker.received))
        await (await harness.caller()).stands(1)
        _, output = await run("status", "--scheduler", harness.address)
        assert ["w1", "draining", *"0001002"] in [row.split()[:9] for row in output.splitlines()]


async def begin_drain(
    harness: SchedulerHarness,
) -> tuple[FakeWorker, asyncio.Task[tuple[int, str]]]:
    """Return a worker with a session, and the command that waits for the end of its drain."""
    worker = await harness.worker("w1")
    await worker.claim(await (await harness.caller()).granted())
    waiting = asyncio.create_task(run("drain", "w1", "--wait", "--scheduler", harness.address))
    await worker.until(lambda: any(one.HasField("drain") for one in worker.received))
    return worker, waiting


async def test_drain_waits_until_the_worker_has_no_session() -> None:
    async with SchedulerHarness.running() as harness:
        worker, waiting = await begin_drain(harness)
        await worker.report(is_draining=True)
        operator = await harness.operator()
        await operator.until(lambda seen: seen.workers["w1"].report.is_draining)
        assert not waiting.done()
        worker.slots[0].state = FREE
        worker.slots[0].lease_id = ""
        await worker.report(is_draining=True)
        code, output = await waiting
        assert (code, output.splitlines()[-1]) == (0, "worker w1 has no session")


async def test_drain_and_stop_wait_until_the_worker_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(draining, "_DETACHED_S", 0.0)
    async with SchedulerHarness.running() as harness:
        worker = await harness.worker("w1")
        command = ("drain", "w1", "--stop", "--wait", "--scheduler", harness.address)
        waiting = asyncio.create_task(run(*command))
        await worker.until(lambda: any(one.drain.is_stop for one in worker.received))
        await worker.leave()
        code, output = await waiting
        assert (code, output.splitlines()[-1]) == (0, "worker w1 has ended")


async def test_drain_waits_on_while_a_scheduler_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = queue.SimpleQueue[str]()  # what each look at the worker finds
    look = draining._look

    async def noted_look(fabric: draining._Fabric, worker_id: str) -> Any:
        try:
            found = await look(fabric, worker_id)
        except CommandError as error:
            looks.put(str(error))
            raise
        looks.put("attached")
        return found

    async def until_found(text: str) -> None:
        while text not in await asyncio.to_thread(looks.get, timeout=WITHIN_S):
            pass

    monkeypatch.setattr(draining, "_look", noted_look)
    monkeypatch.setattr(draining, "_INTERVAL_S", 0.02)
    async with SchedulerHarness.running() as harness:
        worker, waiting = await begin_drain(harness)
        await worker.report(is_draining=True)
        await until_found("attached")
        await worker.vanish()
        await until_found("was lost")
        await harness.stop()
        await until_found("no scheduler answers")
        await harness.start()
        await until_found("has ended")
        worker.register.is_draining = True
        await worker.attach_again()
        await until_found("attached")
        worker.slots[0].state = FREE
        worker.slots[0].lease_id = ""
        await worker.report(is_draining=True)
        code, output = await waiting
    assert (code, output.splitlines()[-1]) == (0, "worker w1 has no session")


async def test_drain_that_waits_fails_if_no_scheduler_answers_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(draining, "_SILENT_S", 0.0)
    async with SchedulerHarness.running() as harness:
        _, waiting = await begin_drain(harness)
        await harness.stop()
        code, output = await waiting
    assert code == 1
    assert "duplane: no scheduler answers" in output


@pytest.mark.slow
async def test_drain_that_is_interrupted_does_not_exit_as_if_the_worker_had_no_session() -> None:
    async with SchedulerHarness.running() as harness:
        worker = await harness.worker("w1")
        await worker.claim(await (await harness.caller()).granted())
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "duplane.tools", "drain", "w1", "--wait"),
            *("--scheduler", harness.address),
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout
        async with asyncio.timeout(2 * WITHIN_S):
            while not (await process.stdout.readline()).startswith(b"sessions of worker w1: 1"):
                pass
            process.send_signal(signal.SIGINT)
            await process.communicate()
        assert process.returncode == EXIT_INTERRUPTED


async def test_drain_that_waits_fails_if_the_worker_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(draining, "_DETACHED_S", 0.0)
    async with SchedulerHarness.running() as harness:
        worker = await harness.worker("w1")
        command = ("drain", "w1", "--stop", "--wait", "--scheduler", harness.address)
        waiting = asyncio.create_task(run(*command))
        await worker.until(lambda: any(one.drain.is_stop for one in worker.received))
        await worker.vanish()
        code, output = await waiting
        assert code == 1
        assert "duplane: worker w1 was lost: its connection" in output


async def test_drain_is_taken_back() -> None:
    async with SchedulerHarness.running() as harness:
        worker = await harness.worker("w1")
        await run("drain", "w1", "--scheduler", harness.address)
        await worker.report(is_draining=True)
        undoing = asyncio.create_task(run("drain", "w1", "--undo", "--scheduler", harness.address))
        await worker.until(lambda: any(one.HasField("undrain") for one in worker.received))
        await worker.report()
        assert await undoing == (0, "worker w1 accepts sessions again\n")
        await (await harness.caller()).granted()


async def test_worker_that_cannot_take_its_drain_back_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(draining, "_UNDRAIN_TIMEOUT_S", 0.05)
    async with SchedulerHarness.running() as harness:
        await harness.worker("w1", is_draining=True)
        code, output = await run("drain", "w1", "--undo", "--scheduler", harness.address)
        assert code == 1
        assert output.startswith("duplane: worker w1 still drains: its process ends")


async def test_undo_of_a_drain_excludes_the_other_flags() -> None:
    code, output = await run("drain", "w1", "--undo", "--wait")
    assert code == 2
    assert "--undo goes with neither" in output


async def test_lost_worker_stays_in_the_table() -> None:
    async with SchedulerHarness.running() as harness:
        operator, worker = await harness.operator(), await harness.worker("w1")
        await worker.vanish()
        await operator.until(lambda seen: "w1" in seen.lost)
        _, output = await run("status", "--scheduler", harness.address)
        assert ["w1", "lost"] in [row.split()[:2] for row in output.splitlines()]


async def test_drain_of_a_worker_that_is_not_attached_fails_by_name() -> None:
    async with SchedulerHarness.running() as harness:
        code, output = await run("drain", "nobody", "--scheduler", harness.address)
        assert code == 1
        assert output == (
            "duplane: no worker is attached as 'nobody'; `duplane status` lists the workers\n"
        )
