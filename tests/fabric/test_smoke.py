"""The whole fabric as a user starts it: real processes and a tiny checkpoint."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import numpy as np
import orjson
import pytest
import soundfile
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from support.fabric.real_fabric import DUPLANE, SLOTS, Client, RealFabric
from support.paths import ROOT, TESTS
from support.speech import speech_like
from support.time_limits import WITHIN_S, until
from websockets.asyncio.client import connect

from duplane.fabric.client import FabricClient
from duplane.fabric.v1 import admin_pb2, lease_pb2, session_pb2


@pytest.fixture(scope="module")
async def fabric() -> AsyncGenerator[RealFabric]:
    async with RealFabric.running(DUPLANE_FAILOVER_S=str(WITHIN_S)) as fabric:
        yield fabric


async def killable_client(url: str, unit_count: int) -> asyncio.subprocess.Process:
    """Start a client in its own process. The client prints a line when its units are sent."""
    script = TESTS / "support" / "fabric" / "killable_client.py"
    return await asyncio.create_subprocess_exec(
        *(sys.executable, str(script), url, str(unit_count)), stdout=asyncio.subprocess.PIPE
    )


async def heard(process: asyncio.subprocess.Process) -> str:
    assert process.stdout
    async with asyncio.timeout(WITHIN_S):
        return (await process.stdout.readline()).decode().strip()


async def test_start_shows_its_progress_and_ends_with_the_next_command(fabric: RealFabric) -> None:
    steps = (
        "building a small random checkpoint",
        "starting the scheduler",
        "starting 1 worker(s): loading the model",
        "weights: file 1 of 1",
        "starting the edge",
    )

    async def is_shown() -> bool:
        return any(steps[-1] in line for line in fabric.log)

    await until(is_shown, WITHIN_S)
    shown = [step for line in fabric.log for step in steps if step in line]
    assert tuple(shown) == steps
    assert fabric.process.stdout
    pages, last = [(await fabric.process.stdout.readline()).decode() for _ in range(2)]
    assert re.fullmatch(r"for operators: http://localhost:\d+/operator\n", pages)
    assert re.fullmatch(rf"in another shell, try: \S+ talk --url ws://{fabric.edge}\n", last)


@pytest.mark.parametrize("dialect", ["A", "B"])
async def test_talk_hears_listening_and_speech(
    fabric: RealFabric, tmp_path: Path, dialect: str
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
    fabric: RealFabric,
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

        await asyncio.gather(keep_talking(), until(is_freed, WITHIN_S))
        await witness.end()
    await fabric.all_free()


async def test_client_that_vanishes_while_queued_leaves_its_place_at_once(
    fabric: RealFabric,
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


async def test_garbage_ends_only_the_session_that_sent_it(fabric: RealFabric) -> None:
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


async def test_internal_client_converses_without_json(fabric: RealFabric) -> None:
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


async def test_example_client_runs(fabric: RealFabric, tmp_path: Path) -> None:
    audio = tmp_path / "speech.f32"
    no_sample = np.float32(np.nan).tobytes()  # this unit fails, and the example still ends
    audio.write_bytes(speech_like(seconds=6).astype("<f4").tobytes() + no_sample)
    example = ROOT / "tools/examples/converse.py"
    assert len(example.read_text().splitlines()) <= 40
    command = [sys.executable, str(example), fabric.scheduler, str(audio)]
    ran = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, check=True, timeout=60
    )
    # The text of a random checkpoint may contain line breaks.
    numbers = re.findall(r"^(\d+) ", ran.stdout, re.MULTILINE)
    assert numbers == [str(number) for number in range(12)]
    assert re.search(r"^6 INVALID_FIELD ", ran.stdout, re.MULTILINE)
    await fabric.all_free()


async def test_every_unit_is_a_trace_from_the_edge_to_the_worker(fabric: RealFabric) -> None:
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


async def test_paused_session_keeps_its_slot_and_is_listed_as_paused(fabric: RealFabric) -> None:
    async def is_paused(expected: bool) -> bool:
        (row,) = (await fabric.get("/workers"))[1]["workers"]
        return [session["is_paused"] for session in row["sessions"]] == [expected]

    async with connect(f"ws://{fabric.edge}/ws/duplex/adx_pauses") as connection:
        client = Client(connection)
        assert (await client.receive())["type"] == "queue_done"
        await client.send({"type": "prepare"})
        assert (await client.receive())["type"] == "prepared"
        await until(lambda: is_paused(False), WITHIN_S)
        await client.send({"type": "pause"})
        await until(lambda: is_paused(True), WITHIN_S)
        assert (await fabric.status())["free_slot_count"] == SLOTS - 1
        await client.send({"type": "resume"})
        await until(lambda: is_paused(False), WITHIN_S)
        await client.send({"type": "stop"})
        await connection.wait_closed()
    await fabric.all_free()


async def test_session_continues_when_its_killed_worker_comes_back(fabric: RealFabric) -> None:
    async with connect(fabric.url) as connection:
        client = Client(connection)
        await client.begin()
        before = await client.exchange()
        fabric.role("worker").kill()
        after = await client.exchange()
        assert after["kv_cache_length"] > before["kv_cache_length"]
        await client.end()
    await fabric.all_free()


async def test_session_survives_the_scheduler(fabric: RealFabric) -> None:
    async with connect(fabric.url) as connection:
        client = Client(connection)
        await client.begin()
        fabric.role("scheduler").kill()
        for _ in range(5):
            await client.exchange()

        async def is_known_again() -> bool:
            return (await fabric.status()).get("free_slot_count") == SLOTS - 1

        await until(is_known_again, WITHIN_S)
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
