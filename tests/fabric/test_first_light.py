"""The whole fabric as a user starts it: `duplane up`, real processes, the tiny checkpoint."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import psutil
import pybase64
import pytest
import soundfile
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from spans import SpanReceiver
from speech import speech_like
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosedError

from duplane.fabric.client import FabricClient
from duplane.fabric.v1 import admin_pb2, lease_pb2, session_pb2

ROOT = Path(__file__).resolve().parents[2]
DUPLANE = (sys.executable, "-m", "duplane.tools")
SLOTS = 2
pytestmark = pytest.mark.timeout(180)


@dataclass
class Fabric:
    """A running `duplane up`."""

    process: asyncio.subprocess.Process
    edge: str
    scheduler: str
    spans: SpanReceiver

    @property
    def url(self) -> str:
        return f"ws://{self.edge}/v1/realtime?mode=audio"

    async def get(self, path: str) -> tuple[int, dict[str, Any]]:
        return await asyncio.to_thread(_get, f"http://{self.edge}{path}")

    async def status(self) -> dict[str, Any]:
        return (await self.get("/status"))[1]

    async def all_free(self, within_s: float = 2.0) -> None:
        async def is_free() -> bool:
            status = await self.status()
            return (
                status.get("free_slot_count") == SLOTS
                and status["lease_count"] == 0
                and status["ticket_count"] == 0
            )

        await until(is_free, within_s)


def _get(url: str) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status, orjson.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, orjson.loads(error.read())


async def until(is_true: Callable[[], Awaitable[bool]], within_s: float) -> None:
    """Ask again and again until it is true; the bound is the assertion."""
    deadline = time.monotonic() + within_s
    while not await is_true():
        assert time.monotonic() < deadline, f"not true within {within_s} s"
        await asyncio.sleep(0.02)


@pytest.fixture(scope="module")
async def fabric() -> AsyncGenerator[Fabric]:
    async with SpanReceiver.serving() as spans:
        up = await asyncio.create_subprocess_exec(
            *(*DUPLANE, "up", "--port", "0", "--slots", str(SLOTS)),
            stdout=asyncio.subprocess.PIPE,
            env={
                **os.environ,
                "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{spans.address}",
                "OTEL_EXPORTER_OTLP_INSECURE": "true",
                "OTEL_BSP_SCHEDULE_DELAY": "100",
            },
        )
        try:
            assert up.stdout
            line = (await up.stdout.readline()).decode()
            ready = re.search(r"ws://(\S+?)/\S* \S* grpc://(\S+)", line)
            assert ready, line
            assert "mean nothing" in line
            yield Fabric(up, ready[1], ready[2], spans)
            children = psutil.Process(up.pid).children(recursive=True)
            up.send_signal(signal.SIGINT)
            assert await up.wait() == 0
            assert not [child for child in children if child.is_running()], "a process was left"
        finally:
            if up.returncode is None:
                up.kill()
                await up.wait()


class Client:
    """A client of dialect A that speaks as fast as it is answered."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection
        self.speech = speech_like(seconds=64)
        self.sent = 0

    async def receive(self) -> dict[str, Any]:
        async with asyncio.timeout(10):
            return orjson.loads(await self.connection.recv())

    async def begin(self) -> None:
        """Wait for a slot, which may still be cleaning up after the session before."""
        while (event := await self.receive())["type"] != "session.queue_done":
            assert event["type"] in ("session.queued", "session.queue_update"), event
        await self.configure()

    async def configure(self) -> None:
        settings = {"instructions": "You are a helpful assistant."}
        await self.send({"type": "session.update", "session": settings})
        assert (await self.receive())["type"] == "session.created"

    async def send(self, message: dict[str, Any]) -> None:
        await self.connection.send(orjson.dumps(message), text=True)

    async def send_unit(self) -> None:
        start = self.sent % 64 * 16_000
        audio = pybase64.b64encode(self.speech[start : start + 16_000].tobytes()).decode()
        self.sent += 1
        await self.send({"type": "input_audio_buffer.append", "audio": audio})

    async def exchange(self) -> dict[str, Any]:
        await self.send_unit()
        answer = await self.receive()
        assert answer["type"] in ("response.listen", "response.output_audio.delta"), answer
        return answer

    async def end(self) -> None:
        await self.send({"type": "session.close", "reason": "user_stop"})
        assert (await self.receive()) == {"type": "session.closed", "reason": "stopped"}
        await self.connection.wait_closed()
        assert self.connection.close_code == 1000


async def killable_client(url: str, unit_count: int) -> asyncio.subprocess.Process:
    """Start a client in a process of its own; a line on stdout says that its units are sent."""
    script = Path(__file__).with_name("killable_client.py")
    return await asyncio.create_subprocess_exec(
        *(sys.executable, str(script), url, str(unit_count)), stdout=asyncio.subprocess.PIPE
    )


async def heard(process: asyncio.subprocess.Process) -> str:
    assert process.stdout
    async with asyncio.timeout(20):
        return (await process.stdout.readline()).decode().strip()


@pytest.mark.parametrize("dialect", ["A", "B"])
async def test_talk_hears_listening_and_speech(
    fabric: Fabric, tmp_path: Path, dialect: str
) -> None:
    wav, reply = tmp_path / "stereo.wav", tmp_path / "reply.wav"
    speech = speech_like(seconds=12, rate_hertz=44_100)
    soundfile.write(wav, np.stack((speech, speech), axis=1), 44_100)
    talk = await asyncio.create_subprocess_exec(
        *(*DUPLANE, "talk", str(wav), "--url", f"ws://{fabric.edge}", "--json"),
        *("--dialect", dialect, "--out", str(reply), "--tail", "2"),
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await talk.communicate()
    rows = [orjson.loads(line) for line in output.splitlines()]
    assert talk.returncode == 0
    assert [row["unit"] for row in rows] == list(range(14))
    assert any(row["decision"] == "listen" for row in rows)
    spoken = [row for row in rows if row["decision"] == "speak" and row["audio_s"]]
    assert spoken
    assert any(row["text"] for row in spoken)
    samples, rate = soundfile.read(reply)
    assert rate == 24_000
    assert len(samples) == round(sum(row["audio_s"] for row in rows) * 24_000)
    assert np.abs(samples).max() > 0.001
    await fabric.all_free()


async def test_killed_client_frees_its_slot_and_no_other_session_feels_it(
    fabric: Fabric,
) -> None:
    async with connect(fabric.url) as connection:
        witness = Client(connection)
        await witness.begin()
        victim = await killable_client(fabric.url, unit_count=3)
        assert await heard(victim) == "sent"
        victim.kill()
        await victim.wait()

        async def is_freed() -> bool:
            return (await fabric.status())["free_slot_count"] == SLOTS - 1

        async def keep_talking() -> None:
            for _ in range(12):
                await witness.exchange()

        await asyncio.gather(keep_talking(), until(is_freed, 2.0))
        await witness.end()
    await fabric.all_free()


async def test_client_that_vanishes_while_queued_leaves_its_place_at_once(
    fabric: Fabric,
) -> None:
    async with connect(fabric.url) as first, connect(fabric.url) as second:
        holders = [Client(first), Client(second)]
        for holder in holders:
            await holder.begin()
        victim = await killable_client(fabric.url, unit_count=0)
        assert await heard(victim) == "session.queued"
        async with connect(fabric.url) as third:
            waiting = Client(third)
            queued = await waiting.receive()
            assert (queued["type"], queued["position"]) == ("session.queued", 2)
            victim.kill()
            await victim.wait()
            moved = await waiting.receive()
            assert (moved["type"], moved["position"]) == ("session.queue_update", 1)
            await holders[0].end()
            await waiting.begin()
            await waiting.exchange()
            await holders[1].exchange()
            await waiting.end()
        await holders[1].end()
    await fabric.all_free()


async def test_garbage_ends_only_the_session_that_sent_it(fabric: Fabric) -> None:
    async with connect(fabric.url) as connection:
        witness = Client(connection)
        await witness.begin()
        for garbage in (b"\0\xff binary", "not json", '{"type":' + "[" * 1000, "\x00"):
            async with connect(fabric.url) as other:
                await Client(other).begin()
                await other.send(garbage)
                await other.wait_closed()
                assert other.close_code == 1003
            await witness.exchange()
        await witness.end()
    await fabric.all_free()


async def test_internal_client_converses_without_json(fabric: Fabric) -> None:
    pcm = speech_like(seconds=8).astype("<f4").tobytes()
    wish = lease_pb2.AcquireLeaseRequest(
        request_id="internal", kind=lease_pb2.SESSION_KIND_AUDIO_DUPLEX
    )
    async with FabricClient([fabric.scheduler]) as client, client.session(wish) as stream:
        opened = await stream.open(session_pb2.Open(seed=1))
        assert opened.prompt_token_count > 0
        for sequence in range(8):
            unit = pcm[sequence * 64_000 : (sequence + 1) * 64_000]
            await stream.send(session_pb2.Unit(sequence=sequence, audio=unit))
            delta = (await stream.read()).delta
            assert delta.sequence == sequence
            assert delta.WhichOneof("outcome") in ("listen", "speech")
            assert delta.token_ids
        await stream.close()
        assert (await stream.read()).closed.reason == session_pb2.CLOSE_REASON_CLIENT
    await fabric.all_free()


async def test_example_client_runs(fabric: Fabric, tmp_path: Path) -> None:
    audio = tmp_path / "speech.f32"
    audio.write_bytes(speech_like(seconds=6).astype("<f4").tobytes())
    example = ROOT / "tools/examples/converse.py"
    assert len(example.read_text().splitlines()) <= 40
    command = [sys.executable, str(example), fabric.scheduler, str(audio)]
    ran = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, check=True, timeout=60
    )
    assert [line.split()[0] for line in ran.stdout.splitlines()] == list("012345")
    await fabric.all_free()


async def test_every_unit_is_a_trace_from_the_edge_to_the_worker(fabric: Fabric) -> None:
    async with connect(fabric.url) as connection:
        client = Client(connection)
        await client.begin()
        for _ in range(4):
            await client.exchange()
        await client.end()

    def with_parents(spans: Sequence[Span]) -> list[tuple[Span, Span]]:
        edge_units = {span.span_id: span for span in spans if span.name == "edge.unit"}
        return [
            (span, edge_units[span.parent_span_id])
            for span in spans
            if span.name == "worker.unit" and span.parent_span_id in edge_units
        ]

    def is_complete(spans: Sequence[Span]) -> bool:
        sessions = {span.trace_id for span in spans if span.name == "edge.session"}
        pairs = with_parents(spans)
        return len(pairs) >= 4 and all(
            of_edge.links[0].trace_id in sessions for _, of_edge in pairs
        )

    spans = await fabric.spans.until(is_complete)
    for of_worker, of_edge in with_parents(spans):
        assert of_worker.trace_id == of_edge.trace_id
        assert not of_edge.parent_span_id
    units = [of_edge.trace_id for _, of_edge in with_parents(spans)]
    assert len(set(units)) == len(units)


async def test_killed_worker_ends_its_sessions_and_comes_back(fabric: Fabric) -> None:
    async with connect(fabric.url) as connection:
        client = Client(connection)
        await client.begin()
        await client.exchange()
        roles = psutil.Process(fabric.process.pid).children()
        worker = next(role for role in roles if "worker" in role.cmdline())
        worker.kill()
        events: list[dict[str, Any]] = []
        with contextlib.suppress(ConnectionClosedError):
            while True:
                events.append(await client.receive())
        assert connection.close_code == 1011
        assert events[-1] == {"type": "session.closed", "reason": "error"}

    async def is_ready() -> bool:
        return (await fabric.get("/ready"))[0] == 200

    await until(is_ready, 60.0)
    async with connect(fabric.url) as connection:
        client = Client(connection)
        await client.begin()
        await client.exchange()
        await client.end()
    await fabric.all_free()


async def test_session_survives_the_scheduler(fabric: Fabric) -> None:
    async with connect(fabric.url) as connection:
        client = Client(connection)
        await client.begin()
        roles = psutil.Process(fabric.process.pid).children()
        next(role for role in roles if "scheduler" in role.cmdline()).kill()
        for _ in range(5):
            await client.exchange()

        async def is_known_again() -> bool:
            return (await fabric.status()).get("free_slot_count") == SLOTS - 1

        await until(is_known_again, 20.0)
        async with FabricClient([fabric.scheduler]) as operator:
            leases = await operator.administer(
                lambda admin: admin.ListLeases(admin_pb2.ListLeasesRequest())
            )
        (lease,) = leases.leases
        assert lease.is_claimed
        assert lease.claims.kind == lease_pb2.SESSION_KIND_AUDIO_DUPLEX
        await client.exchange()
        await client.end()
    await fabric.all_free()
