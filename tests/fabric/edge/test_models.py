"""Clients of each dialect talk to a model with short units and with rates of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import numpy as np
import orjson
import pybase64
import pytest
from google.protobuf.duration_pb2 import Duration
from support.edge.live_edge import LiveEdge, live_edge
from support.time_limits import WITHIN_S
from websockets.asyncio.client import ClientConnection

from duplane.fabric.v1 import model_pb2, session_pb2

ECHO = model_pb2.Model(
    name="echo",
    unit_duration=Duration(nanos=80_000_000),
    input_rate_hertz=24_000,
    output_rate_hertz=12_000,
)
SECONDS = 2
PATHS = {
    "A": "/v1/realtime?mode=audio",
    "B": "/v1/realtime?mode=audio",
    "C": "/ws/duplex/adx_1",
}
OPENINGS = {
    "A": {"type": "session.update", "session": {"instructions": "x"}},
    "B": {"type": "session.init", "payload": {}},
    "C": {"type": "prepare"},
}
REPLIES = {"A": "response.output_audio.delta", "B": "response.output.delta", "C": "result"}


def tone(seconds: float, rate_hertz: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    count = round(seconds * rate_hertz)
    return (0.3 * np.sin(2 * np.pi * 300 * np.arange(count) / rate_hertz)).astype(np.float32)


def echo(unit: session_pb2.Unit) -> Sequence[session_pb2.ConverseResponse]:
    """Return what the unit's sound is at half its rate, as speech."""
    sound = np.frombuffer(unit.audio, "<f4")[::2]
    speech = session_pb2.Speech(text="x", audio=sound.tobytes(), sample_count=sound.size)
    delta = session_pb2.Delta(sequence=unit.sequence, speech=speech)
    return [session_pb2.ConverseResponse(delta=delta)]


@pytest.fixture
async def edge() -> AsyncGenerator[LiveEdge]:
    async with live_edge() as live:
        live.fabric.model = ECHO
        live.fabric.on_unit = echo
        yield live


def append(dialect: str, samples: np.ndarray[Any, np.dtype[np.float32]]) -> dict[str, object]:
    audio = pybase64.b64encode(samples.tobytes()).decode()
    match dialect:
        case "A":
            return {"type": "input_audio_buffer.append", "audio": audio}
        case "B":
            return {"type": "input.append", "input": {"audio": audio}}
        case _:
            return {"type": "audio_chunk", "audio_base64": audio}


async def receive_until(client: ClientConnection, kind: str) -> dict[str, Any]:
    async with asyncio.timeout(WITHIN_S):
        while (event := orjson.loads(await client.recv()))["type"] != kind:
            assert event["type"] != "error", event
    return event


@pytest.mark.parametrize("dialect", ["A", "B"])
async def test_clients_are_told_a_duration_of_units_other_than_a_second(
    edge: LiveEdge, dialect: str
) -> None:
    for model, unit_s in ((ECHO, 0.08), (model_pb2.Model(name="usual"), None)):
        edge.fabric.model = model
        async with edge.connect_to(PATHS[dialect]) as client:
            await client.send(orjson.dumps(OPENINGS[dialect]).decode())
            created = await receive_until(client, "session.created")
        assert created.get("unit_s") == unit_s


async def talk(edge: LiveEdge, dialect: str, append_s: float, *, is_early: bool) -> list[bytes]:
    """Say a tone; return the speech in each reply up to the echo of the last unit."""
    sound = tone(SECONDS, 16_000)
    pieces = np.split(sound, range(round(append_s * 16_000), sound.size, round(append_s * 16_000)))
    async with edge.connect_to(PATHS[dialect]) as client:
        await client.send(orjson.dumps(OPENINGS[dialect]), text=True)
        if not is_early:
            await receive_until(client, "prepared" if dialect == "C" else "session.created")
        for piece in pieces:
            await client.send(orjson.dumps(append(dialect, piece)), text=True)
        replies: list[bytes] = []
        # The last 100 samples of speech come with the next unit.
        while sum(map(len, replies)) < 4 * (24_000 * SECONDS - 2 * 100):
            event = await receive_until(client, REPLIES[dialect])
            replies.append(pybase64.b64decode(event.get("audio") or event.get("audio_data") or ""))
    return [reply for reply in replies if reply]


@pytest.mark.parametrize("dialect", ["A", "B", "C"])
@pytest.mark.parametrize("append_s", [0.02, 0.08, 1.0])
@pytest.mark.parametrize("is_early", [False, True])
async def test_client_hears_the_echo_of_what_it_says(
    edge: LiveEdge, dialect: str, append_s: float, *, is_early: bool
) -> None:
    replies = await talk(edge, dialect, append_s, is_early=is_early)
    heard = np.frombuffer(b"".join(replies), "<f4")
    said = tone(SECONDS, 24_000)
    late = 150  # 6.25 ms, by which the sound reaches the model late
    assert heard[1_000:] == pytest.approx(said[1_000 - late : heard.size - late], abs=1e-3)
    if dialect != "C":
        assert len(replies) == SECONDS * 1000 // 80  # one for each unit
    elif append_s == 1.0 and not is_early:
        assert len(replies) == SECONDS
