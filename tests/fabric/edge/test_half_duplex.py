"""Dialect H on a live edge: its recording, its metrics, and clients that send nonsense."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pybase64
import pytest
import soundfile
from support.edge.live_edge import (
    HandSetClock,
    LiveEdge,
    begin,
    closed,
    end,
    exchange,
    live_edge,
    receive,
    send,
)
from support.protocols.transcripts import spoken
from support.vad_model import write_model
from websockets.asyncio.client import ClientConnection

from duplane.edge.recording.settings import Consent, RecordingSettings
from duplane.edge.recording.storage import recordings
from duplane.fabric.process import StartError

PATH = "/ws/half_duplex/hd_1"
DEAF_S = 0.5
STOP = {"type": "stop"}


def chunk(begin_ms: int, end_ms: int) -> dict[str, Any]:
    sound = spoken(str(begin_ms), str(end_ms))
    return {"type": "audio_chunk", "audio_base64": pybase64.b64encode(sound).decode()}


async def prepare(edge: LiveEdge, client: ClientConnection) -> None:
    assert (await receive(client))["type"] == "queue_done"
    await send(client, {"type": "prepare"})
    assert (await receive(client))["type"] == "prepared"
    assert isinstance(edge.clock, HandSetClock)
    edge.clock.advance(DEAF_S)


async def hear_answer(client: ClientConnection) -> list[dict[str, Any]]:
    events = [await receive(client)]
    while events[-1]["type"] != "turn_done":
        events.append(await receive(client))
    return events


def value(edge: LiveEdge, name: str, **labels: str) -> float | None:
    return edge.edge.metrics.registry.get_sample_value(name, labels)


async def test_recording_has_what_was_heard_and_what_was_answered(tmp_path: Path) -> None:
    recording = RecordingSettings(tmp_path, Consent.ALWAYS)
    async with (
        live_edge(clock=HandSetClock(), recording=recording) as edge,
        edge.connect_to(PATH) as client,
    ):
        await prepare(edge, client)
        await send(client, chunk(5000, 6000))
        await send(client, chunk(6000, 8000))
        events = await hear_answer(client)
        await send(client, STOP)
        assert (await receive(client))["type"] == "stopped"
    (generating,) = (event for event in events if event["type"] == "generating")
    assert generating["speech_duration_ms"] == pytest.approx(1440, abs=100)
    assert events[-1]["text"] == "Hello there."
    (directory,) = recordings(tmp_path)
    user, user_hertz = soundfile.read(directory / "user.wav")
    _, model_hertz = soundfile.read(directory / "model.wav")
    assert (user_hertz, model_hertz) == (16_000, 24_000)
    sent = np.frombuffer(spoken("5000", "8000"), "<f4")
    # What is not heard is noise of -60 dB.
    assert energy(user) == pytest.approx(energy(sent), rel=0.01)
    assert np.count_nonzero(user) < 1.6 * 16_000


def energy(samples: np.ndarray) -> float:
    return float(np.sum(samples.astype(float) ** 2))


async def test_speech_and_sound_that_is_not_heard_are_counted() -> None:
    segments, unheard = "duplane_speech_segments_total", "duplane_unheard_chunks_total"
    delay = "duplane_answer_delay_seconds"
    async with live_edge(clock=HandSetClock()) as edge, edge.connect_to(PATH) as client:
        assert (await receive(client))["type"] == "queue_done"
        await send(client, {"type": "prepare"})
        assert (await receive(client))["type"] == "prepared"
        await send(client, chunk(5000, 8000))
        await send(client, {"type": "unknown"})
        assert (await receive(client))["type"] == "error"
        assert value(edge, unheard) == 1
        assert isinstance(edge.clock, HandSetClock)
        edge.clock.advance(DEAF_S)
        await send(client, chunk(5000, 8000))
        await hear_answer(client)
        assert value(edge, segments, outcome="turn") == 1
        assert value(edge, segments, outcome="too_short") == 0
        assert value(edge, f"{delay}_count") == 1
        # The client was silent for `min_silence_duration_ms` before its speech counted as over.
        assert value(edge, f"{delay}_sum") == pytest.approx(0.5, abs=0.1)
        await send(client, STOP)
        assert (await receive(client))["type"] == "stopped"


async def test_other_sessions_feel_nothing_of_odd_clients() -> None:
    odd = [
        "{nonsense",
        '{"type":"audio_chunk","audio_base64":"AAA"}',
        '{"type":"prepare","config":7}',
    ]
    clock = HandSetClock()
    async with live_edge(clock=clock, slot_count=3) as edge, edge.connect() as other:
        await begin(other)
        for frame in odd:
            async with edge.connect_to(PATH) as client:
                await prepare(edge, client)
                await client.send(frame)
                if frame == odd[0]:
                    await closed(client, 1003)
                    continue
                assert (await receive(client))["type"] == "error"
                await send(client, chunk(5000, 8000))
                assert (await hear_answer(client))[-1]["turn_index"] == 1
                await send(client, STOP)
                assert (await receive(client))["type"] == "stopped"
        await exchange(other)
        await end(other)


async def test_the_model_of_the_operator_finds_the_speech(tmp_path: Path) -> None:
    model = write_model(tmp_path / "vad.onnx")  # takes everything but the first window for speech
    async with (
        live_edge(clock=HandSetClock(), vad_model=model) as edge,
        edge.connect_to(PATH) as client,
    ):
        await prepare(edge, client)
        silence = pybase64.b64encode(bytes(4 * 16_000)).decode()
        await send(client, {"type": "audio_chunk", "audio_base64": silence})
        assert await receive(client) == {"type": "vad_state", "speaking": True}


async def test_an_edge_does_not_start_with_a_file_that_is_no_model(tmp_path: Path) -> None:
    file = tmp_path / "vad.onnx"
    file.write_bytes(b"no model")
    with pytest.raises(StartError, match=r"vad_model: vad\.onnx is no ONNX model"):
        async with live_edge(vad_model=file):
            pass
