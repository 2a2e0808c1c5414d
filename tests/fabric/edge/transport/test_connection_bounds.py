"""Bounds of connections, in total and per client, and of HTTP answers that clients never read."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import orjson
import pytest
import soundfile
from support.edge.live_edge import (
    AUDIO_PATH,
    QUICK,
    begin,
    drip,
    end,
    ended,
    exchange,
    is_welcome,
    live_edge,
    witness_of,
)
from support.edge.raw_client import RawClient
from support.time_limits import WITHIN_S

from duplane.edge.recording.settings import Consent, RecordingSettings
from duplane.edge.recording.storage import Meta, write_meta
from duplane.edge.settings import Limits
from duplane.edge.transport import client_protocol

pytestmark = pytest.mark.timing


async def test_runners_above_the_bound_are_cut_until_one_leaves() -> None:
    limits = replace(Limits(), connection_count=3)
    async with live_edge(limits, slot_count=2) as edge, edge.connect() as client:
        await begin(client)
        async with RawClient(edge.edge.address), RawClient(edge.edge.address) as last:
            await last.send(b"GET /health ")
            async with RawClient(edge.edge.address) as late:
                assert await late.read() == b""
            await exchange(client)
            await last.send(b"HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await last.read_all()).startswith(b"HTTP/1.1 200 ")
        async with edge.connect() as another:
            await begin(another)
            await end(another)
        await end(client)


@pytest.mark.parametrize(("proxies", "is_cut"), [((), True), (("127.0.0.0/8",), False)])
async def test_runners_of_one_client_are_bounded_and_those_of_a_proxy_are_not(
    proxies: tuple[str, ...], is_cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_protocol, "is_loopback", lambda _: False)  # as from elsewhere
    limits = replace(Limits(), client_connection_count=2)
    async with (
        live_edge(limits, trusted_proxies=proxies) as edge,
        RawClient(edge.edge.address) as first,
        RawClient(edge.edge.address) as second,
        RawClient(edge.edge.address) as third,
    ):
        for client in (first, second):
            await client.send(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
        with contextlib.suppress(OSError):
            await third.send(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await third.read_all() == b"") is is_cut
        await first.send(b"\r\n")
        assert (await first.read_all()).startswith(b"HTTP/1.1 200 ")


async def test_hundreds_that_say_nothing_are_cut_and_a_session_goes_on() -> None:
    limits = replace(Limits(), client_s=1.0)
    async with live_edge(limits) as edge, witness_of(edge), contextlib.AsyncExitStack() as stack:
        silent = [await stack.enter_async_context(RawClient(edge.edge.address)) for _ in range(300)]
        assert [await client.read() for client in silent] == [b""] * 300


async def test_slots_of_many_that_never_begin_go_round() -> None:
    """Sessions that send nothing wait in the queue. Each gets a slot and loses it again."""
    limits = replace(Limits(), init_s=0.3, close_s=0.2)
    async with (
        live_edge(limits, slot_count=11) as edge,
        witness_of(edge),
        contextlib.AsyncExitStack() as stack,
    ):
        for _ in range(100):
            client = await stack.enter_async_context(RawClient(edge.edge.address))
            await client.upgrade(AUDIO_PATH)
        async with asyncio.timeout(2 * WITHIN_S):
            for _ in range(100):
                await ended(await edge.fabric.conversation())


# --- HTTP ---


@pytest.fixture(scope="module")
def long_voice(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a voice of one minute. An answer with it is larger than the buffers of sockets."""
    path = tmp_path_factory.mktemp("voice") / "voice.wav"
    soundfile.write(path, np.zeros(16_000 * 60, "f4"), 16_000)
    return path


@pytest.mark.parametrize(
    ("limits", "step"),
    [(QUICK, 0), (replace(Limits(), init_s=0.02), 1000)],
    ids=["reads nothing", "drips"],
)
async def test_http_client_that_does_not_read_its_answer_is_cut(
    limits: Limits, step: int, long_voice: Path
) -> None:
    limits = replace(limits, connection_count=2)
    async with (
        live_edge(limits, default_voice=long_voice) as edge,
        witness_of(edge),
        RawClient(edge.edge.address) as client,
    ):
        await client.send(b"GET /api/default_ref_audio HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert await client.read(1)
        reading = asyncio.ensure_future(drip(client, step))
        async with asyncio.timeout(WITHIN_S):
            while not await is_welcome(edge):
                pass
        reading.cancel()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells by a file")
async def test_voice_that_many_ask_for_and_nobody_reads_is_held_once(long_voice: Path) -> None:
    def rss_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    async with (
        live_edge(QUICK, default_voice=long_voice) as edge,
        contextlib.AsyncExitStack() as stack,
    ):
        before_bytes = rss_bytes()
        for _ in range(40):  # five megabytes each
            client = await stack.enter_async_context(RawClient(edge.edge.address))
            await client.send(b"GET /api/default_ref_audio HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert await client.read(1)
        assert rss_bytes() - before_bytes < 100e6


@pytest.fixture(scope="module")
def long_recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with one recording of 30 MB, whose audio cannot be compressed."""
    root = tmp_path_factory.mktemp("recordings")
    (root / "sess_0").mkdir()
    noise = np.random.default_rng(0).bytes(30_000_000)
    (root / "sess_0/user.wav").write_bytes(noise)
    text = orjson.dumps({"seq": 0, "frame": {"text": "x" * 1000}})
    (root / "sess_0/stream.jsonl").write_bytes((text + b"\n") * 30_000)
    write_meta(root / "sess_0", Meta("sess_0", "/", "audio", 1.0, ended_at=2.0))
    return root


@pytest.mark.parametrize("below", ["recording", "download", "assets/user.wav"])
@pytest.mark.parametrize(
    ("limits", "step"),
    [(QUICK, 0), (replace(Limits(), init_s=0.02), 1000)],
    ids=["reads nothing", "drips"],
)
async def test_who_does_not_read_a_recording_is_cut(
    limits: Limits, step: int, below: str, long_recording: Path
) -> None:
    limits = replace(limits, connection_count=2)
    async with (
        live_edge(limits, recording=RecordingSettings(long_recording, Consent.ALWAYS)) as edge,
        witness_of(edge),
        RawClient(edge.edge.address) as client,
    ):
        path = f"/api/sessions/sess_0/{below}".encode()
        await client.send(b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n" % path)
        assert b" 200 " in await client.read(15)
        reading = asyncio.ensure_future(drip(client, step))
        async with asyncio.timeout(WITHIN_S):
            while not await is_welcome(edge):
                pass
        reading.cancel()


async def test_refused_upgrade_does_not_keep_its_connection() -> None:
    async with live_edge(QUICK) as edge, RawClient(edge.edge.address) as client:
        await client.send(b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\n\r\n")
        async with asyncio.timeout(WITHIN_S):
            assert await client.read_all()
