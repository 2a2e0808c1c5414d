"""`duplane bench fabric` on real processes: each unit has one answer; all slots are free after."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest
from support.edge.live_edge import LiveEdge, live_edge
from support.edge.scripted_fabric import listened
from support.fabric.processes import alive
from support.paths import ROOT
from support.protocols.transcripts import pcm
from support.time_limits import WITHIN_S
from support.tools.command import run_command

from duplane.fabric import process
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.v1 import session_pb2
from duplane.tools.bench.load.run import bench_fabric
from duplane.tools.bench.options import FabricBench

pytestmark = pytest.mark.timing

SESSIONS, SECONDS, WARM_UP = 20, 12, 2
# A process may grow by at most this much between the middle and the end of the soak, because the
# allocator may keep some memory of ended sessions. A process that kept the sound of each unit would
# grow by 5 MB (20 sessions, 4 s, 64 KB).
GROWTH_MB = 4.0


def measure(*flags: str, folder: Path) -> dict[str, Any]:
    """Run the command; return its JSON file."""
    file = folder / "load.json"
    code, output = run_command("bench", "fabric", *flags, "--json", str(file))
    assert code == 0, output
    return orjson.loads(file.read_bytes())


def assert_answered_once(row: Mapping[str, Any]) -> None:
    """Assert that each unit has one answer, in time unless the generator was late.

    On a loaded machine, replacing a session may take more than a second. Then one unit is not sent.
    """
    counts = dict(row["counts"])
    sent, late = counts.pop("sent"), counts.pop("late") - counts.pop("late_by_generator")
    due = row["sessions"] * row["seconds"]
    assert counts.pop("answered") == sent == due - counts.pop("unsent") > due / 2
    assert not any(counts.values()), row
    if row["generator"]["is_punctual"]:
        assert not late, row


def break_session(unit: session_pb2.Unit) -> list[Any]:
    """Act as the worker: drop the second unit, fail the fourth, end the session at the fifth."""
    match unit.sequence:
        case 1:
            return []
        case 3:
            failed = session_pb2.Failed(sequence=3, reason="INTERNAL", message="scripted")
            return [session_pb2.ConverseResponse(failed=failed)]
        case 4:
            return [FabricError(Reason.ENGINE_FAILED, "scripted")]
        case _:
            (response,) = listened(unit)
            response.delta.dropped_unit_count = int(unit.sequence == 2)
            response.delta.stage_times.total.FromMilliseconds(1)
            return [response]


async def check_lost_units(edge: LiveEdge, dialect: str) -> None:
    scheduler = f"grpc://{edge.fabric.scheduler}"
    options = FabricBench(
        url=scheduler if dialect == "grpc" else f"ws://{edge.edge.address}",
        dialects=(dialect,),
        processes=(f"server={os.getpid()}",),
        sessions=(1,),
        seconds=6.0,
        warm_up_s=0.0,
    )
    (row,) = await bench_fabric(options)
    counts = row.counts
    assert counts.broken_sessions == counts.dropped == 1, row
    assert counts.failed + counts.unanswered == 2, row  # the last unit; C reports the failure
    assert counts.sent + counts.unsent == 6, row
    assert counts.sent == counts.answered + 3, row
    assert not row.holds
    assert any("scripted" in reason or "lost" in reason for reason in row.failures), row
    assert list(row.processes) == ["server"]
    assert row.slots_left is None


@pytest.mark.slow
async def test_units_that_are_lost_are_counted_once() -> None:
    async with live_edge(slot_count=4) as edge:
        edge.fabric.on_unit = break_session
        # Each of them takes six seconds.
        await asyncio.gather(*(check_lost_units(edge, each) for each in ("A", "B", "C", "grpc")))


def speaks(unit: session_pb2.Unit) -> list[Any]:
    """Speak in each unit."""
    (response,) = listened(unit)
    response.delta.speech.audio = pcm(24_000)
    return [response]


async def check_answered_units(edge: LiveEdge, dialect: str) -> None:
    options = FabricBench(
        url=f"ws://{edge.edge.address}",
        dialects=(dialect,),
        sessions=(1,),
        seconds=3.0,
        warm_up_s=0.0,
        session_s=2.0,
    )
    (row,) = await bench_fabric(options)
    counts = row.counts
    assert not row.failures, row
    assert counts.sent + counts.unsent == 3, row
    assert counts.answered == counts.sent > 1, row
    assert not counts.broken_sessions + counts.unanswered + counts.doubled, row
    assert not row.is_worker_time_known


@pytest.mark.slow
async def test_units_of_protocols_of_openai_are_answered_once() -> None:
    async with live_edge(slot_count=2) as edge:
        edge.fabric.on_unit = speaks
        await asyncio.gather(*(check_answered_units(edge, each) for each in ("E", "L")))


def names(value: object) -> set[str]:
    """Return the keys of an object and of the objects in it."""
    match value:
        case dict():
            return {str(key) for key in value}.union(*map(names, value.values()))
        case list():
            return set().union(*map(names, value))
        case _:
            return set()


def assert_documented(found: Mapping[str, Any]) -> None:
    """Assert that docs/load.md names every field of the JSON file."""
    page = (ROOT / "docs" / "load.md").read_text()
    documented = set(re.findall(r"`(\w+)`", page))
    assert names(found) - set(found["options"]) - {"edge", "scheduler", "worker"} <= documented


@pytest.mark.slow
def test_soak_with_renewed_sessions_leaves_nothing(tmp_path: Path) -> None:
    flags = ("--sessions", str(SESSIONS), "--seconds", str(SECONDS), "--warm-up-s", str(WARM_UP))
    found = measure(*flags, "--session-s", "4", "--generators", "2", folder=tmp_path)
    (row,) = found["rows"]
    assert_answered_once(row)
    assert row["slots_left"] == 0
    assert row["is_worker_time_known"]
    assert row["exported_bytes"] is None
    assert row["page_bytes"] is None
    assert row["latency_ms"]["p50"] > row["added_ms"]["p50"] > 0
    for name in ("edge", "scheduler", "worker"):
        cost = row["processes"][name]
        assert cost["cpu_us_per_unit"] > 0
        assert cost["rss_peak_mb"] >= cost["rss_end_mb"] > 10
        assert cost["rss_end_mb"] - cost["rss_middle_mb"] < GROWTH_MB, row
    assert_documented(found)


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["--kill-every-s", "--restart-every-s"])
def test_stopped_workers_lose_no_session(tmp_path: Path, flag: str) -> None:
    flags = ("--sessions", "4", "--workers", "2", flag, "4", "--seconds", "8")
    found = measure(*flags, folder=tmp_path)
    (row,) = found["rows"]
    counts = row["counts"]
    assert counts["answered"] == counts["sent"] == 4 * 8
    assert not counts["doubled"] + counts["broken_sessions"] + row["slots_left"], row
    moves = row["moves"]
    # Two workers have two sessions each, and one worker is stopped.
    assert (moves["is_killed"], moves["stop_count"]) == (flag == "--kill-every-s", 1)
    assert moves["session_count"] == 2
    assert 0 < moves["gap_ms"]["p50"] <= moves["gap_ms"]["max"]
    assert not [problem for problem in row["problems"] if "ended" in problem]
    assert_documented(found)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_signal_stops_every_process_of_a_measurement(number: signal.Signals) -> None:
    command = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "duplane.tools", "bench", "fabric", "--sessions", "1"),
        *("--warm-up-s", "0", "--seconds", "300"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    assert command.stderr
    try:
        async with asyncio.timeout(WITHIN_S):
            while b"units answered" not in await command.stderr.readline():
                pass
            started = psutil.Process(command.pid).children(recursive=True)
            assert len(started) == 4
            command.send_signal(number)
            assert await command.wait() == process.EXIT_INTERRUPTED
    finally:
        if command.returncode is None:
            command.kill()
            await command.wait()
    assert not alive(started)


@pytest.mark.slow
def test_session_that_does_not_open_ends_the_command_with_one_line() -> None:
    flags = ("--dialect", "A", "--sessions", "1", "--open-timeout-s", "0.001")
    code, output = run_command("bench", "fabric", "--checkpoint", "scripted", *flags)
    assert (code, output) == (
        1,
        "duplane: no session could be opened: the session did not open in 0.001 s\n",
    )


@pytest.mark.slow
def test_every_protocol_in_step_with_telemetry_and_pages_of_operators(tmp_path: Path) -> None:
    flags = ("--sessions", "3", "--dialect", "A,C,grpc", "--phases", "step", "--telemetry")
    flags = (*flags, "--operator-pages", "2")
    times = ("--seconds", "2", "--warm-up-s", "1", "--session-s", "2")
    rows = measure(*flags, *times, folder=tmp_path)["rows"]
    for row in rows:
        assert_answered_once(row)
        assert row["slots_left"] == 0
        assert row["exported_bytes"] > 1000
        assert row["page_bytes"] > 1000
        assert not [problem for problem in row["problems"] if "operators" in problem], row
    assert [row["dialect"] for row in rows] == ["A", "C", "grpc"]
    assert [row["is_worker_time_known"] for row in rows] == [False, True, True]
