"""Nothing that a client says or shows is in logs, spans, metrics or recordings of others.

A client puts a word of its own into every field that it can send. Then all places are searched for
these words, for its tokens, and for its sound.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson
import pybase64
import pytest
from prometheus_client import generate_latest
from support.edge.live_edge import APPEND, CLOSE, receive, send
from support.fabric.traced_fabric import TracedFabric, begin_session, traced_fabric
from support.monitoring.log_state import restored_logging
from support.protocols.transcripts import wav
from support.time_limits import WITHIN_S
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from duplane.edge.content.voices import INDEX
from duplane.edge.recording.settings import RecordingSettings
from duplane.edge.recording.storage import recordings
from duplane.fabric.monitoring.logs import configure_logging

pytestmark = pytest.mark.slow

WORD = "qanary"  # no other text has it
SOUND = np.random.default_rng(7).uniform(-1, 1, 16_000).astype("<f4").tobytes()
AUDIO = pybase64.b64encode(SOUND).decode()
# Parts of the sound, as bytes and as base64, that begin at any of its characters.
NEEDLES = [WORD.encode(), WORD.encode()[::-1], SOUND[400:420], AUDIO[400:430].encode()]


class Words:
    """Makes words that say in which field they were."""

    def __init__(self) -> None:
        self.count = 0

    def __getitem__(self, field: str) -> str:
        self.count += 1
        return f"{WORD}-{field}-{self.count}"


words = Words()


def url(fabric: TracedFabric, path: str, scheme: str = "ws") -> str:
    assert fabric.edge
    return f"{scheme}://{fabric.edge.address}{path}"


async def until_closed(client: ClientConnection) -> None:
    """Read until the edge closes the connection."""
    async with asyncio.timeout(WITHIN_S):
        with contextlib.suppress(ConnectionClosed):
            while True:
                await client.recv()


async def say(client: ClientConnection) -> None:
    await send(client, APPEND)
    assert str((await receive(client))["type"]).startswith("response.")


async def speak_in_a(fabric: TracedFabric) -> None:
    """Send a word in every field of dialect A, in headers and in the URL."""
    headers = {
        "Authorization": f"Bearer {words['bearer']}",
        "Cookie": f"session={words['cookie']}",
        "X-Client-Id": words["client-header"],
        "User-Agent": words["agent"],
        "X-Forwarded-For": words["forwarded"],
        "traceparent": words["traceparent"],
    }
    query = f"mode=audio&client_id={words['client']}&token={words['token']}&other={words['query']}"
    async with fabric.connect(query, additional_headers=headers) as client:
        while (await receive(client))["type"] != "session.queue_done":
            pass
        voice = {"ref_audio": AUDIO, "voice": words["voice"], "seed": 1, words["field"]: 1}
        await send(
            client,
            {"type": "session.update", "session": {"instructions": words["prompt"], **voice}},
        )
        assert (await receive(client))["type"] == "session.created"
        append = {"type": "input_audio_buffer.append", "audio": AUDIO}
        await send(client, append)
        kinds = [(await receive(client))["type"]]
        for refused in (
            {"type": words["type"]},
            {**append, "audio": words["audio"]},
            {**append, "video_frames": [words["picture"]]},
            {**append, "force_listen": words["flag"]},
        ):
            await send(client, refused)
            kinds.append((await receive(client))["type"])
        assert kinds.count("error") >= 3
        await send(client, {"type": "session.close", "reason": words["reason"]})
        await until_closed(client)


async def speak_in_b_and_c(fabric: TracedFabric) -> None:
    """Send words in dialects B and C, and what is no JSON."""
    async with fabric.connect("mode=audio") as client:
        await receive(client)
        payload = {"system_prompt": words["prompt"], "ref_audio_base64": AUDIO}
        await send(client, {"type": "session.init", "payload": payload})
        await receive(client)
        await send(client, {"type": "input.append", "input": {"audio": AUDIO, "text": words["b"]}})
        await receive(client)
        await send(client, {"type": "session.close", "reason": words["reason"]})
        await until_closed(client)
    async with connect(url(fabric, f"/ws/duplex/adx_{words['id']}"), proxy=None) as client:
        await receive(client)
        prompt = {"prefix_system_prompt": words["prompt"], "config": {"x": words["config"]}}
        await send(client, {"type": "prepare", **prompt})
        await receive(client)
        await send(client, {"type": "audio_chunk", "audio_base64": AUDIO})
        await receive(client)
        await client.send(f"{{{words['broken']}")
        await until_closed(client)


async def chat(fabric: TracedFabric) -> None:
    """Send words in chats, in valid requests and in others."""
    said: dict[str, Any] = {"messages": [{"role": "user", "content": words["chat"]}]}
    wrong = {"messages": [{"role": words["role"], "content": words["chat"]}]}
    async with aiohttp.ClientSession() as http:
        for body in (
            said,
            {**said, "tts": {"ref_audio_data": words["tts"]}},
            wrong,
            [words["list"]],
        ):
            await http.post(url(fabric, "/api/chat", "http"), json=body)
        await http.post(url(fabric, "/api/chat", "http"), data=words["body"])
        completions = url(fabric, "/v1/chat/completions", "http")
        for body in (
            {**said, "model": words["named model"], "user": words["user"]},
            {**said, "stream": True},
            {**wrong, "stop": words["stop"]},
            wrong,
        ):
            await http.post(completions, json=body)
        async with http.get(url(fabric, f"/v1/models/{words['asked']}", "http")) as answer:
            await answer.read()
    async with connect(url(fabric, "/ws/chat"), proxy=None) as client:
        await send(client, said)
        await until_closed(client)


async def be_refused(fabric: TracedFabric) -> None:
    """Ask for what there is not."""
    for query in (f"mode={words['mode']}", f"mode=audio&model={words['model']}"):
        async with fabric.connect(query) as client:
            await receive(client)
    async with aiohttp.ClientSession() as http:
        await http.get(url(fabric, f"/{words['path']}", "http"))


async def attach(fabric: TracedFabric, recording: str) -> None:
    """Upload a voice, and a file to a recording, under names that are words."""
    async with aiohttp.ClientSession() as http:
        sound = pybase64.b64encode(wav(16_000)).decode()
        voice = {"name": words["voice"], "audio_base64": sound}
        await http.post(url(fabric, "/api/assets/ref_audio", "http"), json=voice)
        form = aiohttp.FormData()
        form.add_field("file", b"x", filename=words["file"], content_type="video/webm")
        headers = {"Authorization": "Bearer none"}
        path = f"/api/sessions/{recording}/upload-recording"
        await http.post(url(fabric, path, "http"), data=form, headers=headers)


def found_in(content: bytes) -> Iterator[str]:
    for needle in NEEDLES:
        at = content.find(needle)
        if at >= 0:
            yield content[max(0, at - 200) : at + 60].decode(errors="replace")


@pytest.mark.parametrize("log_format", ["text", "json"])
async def test_words_and_sound_of_a_client_are_nowhere_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], log_format: Any
) -> None:
    root = tmp_path / "recordings"
    voices = tmp_path / "voices"
    voices.mkdir()
    settings = {"recording": RecordingSettings(root), "ref_audio": voices}
    log = ""
    with restored_logging():
        configure_logging("edge", "DEBUG", log_format)
        async with traced_fabric(slot_count=3, edge_settings=settings) as fabric:
            async with fabric.connect("mode=audio&recording=on") as witness:
                await begin_session(witness)
                await say(witness)
                await speak_in_a(fabric)
                await speak_in_b_and_c(fabric)
                await chat(fabric)
                await be_refused(fabric)
                (recorded,) = recordings(root)
                await attach(fabric, recorded.name)
                await say(witness)
                await send(witness, CLOSE)
                await until_closed(witness)
            assert fabric.edge
            spans = str(await fabric.ended(4)).encode()
            metrics = generate_latest(fabric.edge.metrics.registry)
        log = capsys.readouterr().err
    assert words.count > 25
    assert "session" in log
    assert b"duplane_sessions" in metrics
    assert len(spans) > 1000
    assert list(found_in((voices / INDEX).read_bytes())), "the search finds no word"
    files = [path for path in recorded.rglob("*") if path.is_file()]
    assert {"stream.jsonl", "user.wav", "frontend_replay.webm"} <= {path.name for path in files}
    places = {"log": log.encode(), "spans": spans, "metrics": metrics}
    places |= {path.name: path.read_bytes() for path in files}
    leaks = {name: leak for name, content in places.items() for leak in found_in(content)}
    assert not leaks, orjson.dumps(leaks, option=orjson.OPT_INDENT_2).decode()
    assert recordings(root) == [recorded], "a session was recorded that nobody asked to record"
