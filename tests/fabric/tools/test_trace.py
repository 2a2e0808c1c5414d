"""`duplane trace` and `duplane up --trace` as a user runs them, with real processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from support.edge.live_edge import end, receive, send
from support.fabric.traced_fabric import append, begin_session
from websockets.asyncio.client import connect

import duplane.tools.up.tracing
from duplane.fabric.monitoring import spans
from duplane.fabric.monitoring.spans import FinishedSpan, SpanIds, Telemetry
from duplane.tools.up.tracing import traced

DUPLANE = (sys.executable, "-m", "duplane.tools")
MS = 1_000_000
START_NS = 1_714_200_000_000 * MS


@contextlib.asynccontextmanager
async def started(*arguments: str) -> AsyncGenerator[tuple[asyncio.subprocess.Process, str]]:
    """Start a verb of `duplane`; yield the process and the first line that it prints."""
    process = await asyncio.create_subprocess_exec(
        *DUPLANE, *arguments, stdout=asyncio.subprocess.PIPE, env={**os.environ}
    )
    try:
        assert process.stdout
        async with asyncio.timeout(60):
            yield process, (await process.stdout.readline()).decode()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def interrupted(process: asyncio.subprocess.Process) -> str:
    """Press Ctrl-C; return the output of the process after that."""
    process.send_signal(signal.SIGINT)
    async with asyncio.timeout(60):
        output, _ = await process.communicate()
    assert process.returncode == 0
    return output.decode()


def shown(*arguments: str) -> str:
    ran = subprocess.run(
        (*DUPLANE, "trace", *arguments), capture_output=True, text=True, check=True, timeout=60
    )
    return ran.stdout


def export_units(address: str) -> None:
    """Export three units, of which the last has a slow stage."""
    exporter = OTLPSpanExporter(address, insecure=True)
    telemetry = Telemetry("edge", SimpleSpanProcessor(exporter))
    for number, slow_ms in enumerate((1, 1, 1500)):
        begins_ms = (0, 1, 2, 3, 4, 5, 5 + slow_ms)
        telemetry.record(
            FinishedSpan(
                spans.EDGE_UNIT,
                SpanIds.new(),
                START_NS,
                START_NS + (6 + slow_ms) * MS,
                {
                    spans.SESSION_ID: "sess_1",
                    spans.UNIT_SEQUENCE: number,
                    spans.UNIT_OUTCOME: "listen",
                    spans.UNIT_IS_LATE: slow_ms > 1000,
                },
                stages=[
                    (stage, START_NS + begin_ms * MS)
                    for stage, begin_ms in zip(spans.EDGE_STAGES, begins_ms, strict=True)
                ],
            )
        )
    telemetry.shutdown()


async def test_received_spans_are_shown_at_the_end_and_again_from_the_file(tmp_path: Path) -> None:
    file = tmp_path / "spans.jsonl"
    async with started("trace", "--listen", "127.0.0.1:0", "--out", str(file)) as (process, first):
        found = re.search(r"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=(http://\S+)", first)
        assert found, first
        await asyncio.to_thread(export_units, found[1])
        output = await interrupted(process)
    verdict = "sess_1 unit 2: late, edge render 1500.0 ms (usually 1.0 ms): the edge rendered"
    assert "3 units, 1 late" in output
    assert verdict in output
    assert verdict in shown(str(file), "--session", "sess_1")
    of_unit = shown(str(file), "--unit", "1")
    assert "unit 1 of sess_1, listen, 7.0 ms" in of_unit
    assert "unit 2" not in of_unit
    assert shown(str(file), "--session", "sess_2") == "no such unit was received\n"


async def test_up_shows_the_units_of_its_processes_at_the_end(tmp_path: Path) -> None:
    file = tmp_path / "spans.jsonl"
    flags = ("--checkpoint", "scripted", "--port", "0", "--trace-out", str(file))
    async with started("up", *flags) as (process, ready):
        address = re.search(r"ws://(\S+?)/", ready)
        assert address, ready
        url = f"ws://{address[1]}/v1/realtime?mode=audio"
        async with connect(url, max_size=None, proxy=None) as client:
            await begin_session(client)
            for _ in range(5):
                await send(client, append(0.5))
                await receive(client)
            await end(client)
        output = await interrupted(process)
    assert "5 units, 0 late" in output
    for stage in ("edge parse", "network there", "worker decode", "network back", "edge write"):
        assert re.search(rf"^{stage} +5 ", output, re.MULTILINE), stage
    (session,) = set(re.findall(r"sess_\w+", output))
    of_session = shown(str(file), "--session", session)
    for step in (spans.SCHEDULER_QUEUE, spans.EDGE_OPEN, spans.WORKER_SESSION):
        assert re.search(rf"^{re.escape(step)} ", of_session, re.MULTILINE), step


@pytest.mark.parametrize(("limit_bytes", "kept"), [(0, "no unit"), (1500, "1 units")])
async def test_full_disk_costs_only_the_file(tmp_path: Path, limit_bytes: int, kept: str) -> None:
    file = tmp_path / "spans.jsonl"
    async with started("trace", "--listen", "127.0.0.1:0", "--out", str(file)) as (process, first):
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
        await asyncio.to_thread(export_units, first.strip().partition("=")[2])
        assert "3 units, 1 late" in await interrupted(process)
    assert kept in shown(str(file)), "only whole lines are written"


@pytest.fixture
def receivers(monkeypatch: pytest.MonkeyPatch) -> list[asyncio.subprocess.Process]:
    """Return the list of the processes that `traced` starts."""
    found: list[asyncio.subprocess.Process] = []
    start = asyncio.create_subprocess_exec

    async def record(*arguments: Any, **options: Any) -> asyncio.subprocess.Process:
        found.append(await start(*arguments, **options))
        return found[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", record)
    for name in ("OTEL_TRACES_EXPORTER", "OTEL_BSP_SCHEDULE_DELAY"):
        # `traced` changes these variables. monkeypatch restores only variables that it has set.
        monkeypatch.setenv(name, "")
    for name in ("ENDPOINT", "INSECURE"):
        monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_TRACES_{name}", "")
    return found


async def test_report_is_read_while_the_receivers_stdin_is_open(
    receivers: list[asyncio.subprocess.Process],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def communicate(process: asyncio.subprocess.Process) -> tuple[bytes, None]:
        """Close stdin before reading, as Python does since 3.12."""
        assert process.stdin
        assert process.stdout
        process.stdin.close()
        return await process.stdout.read(), None

    monkeypatch.setattr(asyncio.subprocess.Process, "communicate", communicate)
    async with traced(is_traced=True, out=None, show=print):
        pass
    assert capsys.readouterr().out.strip() == "no unit was received"
    assert receivers[0].returncode == 0


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
async def test_receiver_that_fails_costs_only_the_report(
    fault: signal.Signals,
    receivers: list[asyncio.subprocess.Process],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(duplane.tools.up.tracing, "STOP_TIMEOUT_S", 0.2)
    async with traced(is_traced=True, out=None, show=print):
        receivers[0].send_signal(fault)
        if fault is signal.SIGKILL:
            await receivers[0].wait()
    assert "there is no report of spans" in caplog.text
    assert receivers[0].returncode == -signal.SIGKILL


async def test_address_in_use_is_refused() -> None:
    async with started("trace", "--listen", "127.0.0.1:0") as (_, first):
        address = first.strip().rpartition("//")[2]
        with pytest.raises(subprocess.CalledProcessError) as refused:
            await asyncio.to_thread(shown, "--listen", address)
        assert f"cannot listen on {address}" in refused.value.stderr
