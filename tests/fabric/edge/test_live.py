"""Dialect L on a live edge: OpenAI's own client, the subprotocol with a key, and the recording."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pybase64
import pytest
import soundfile
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from support.client_packages import needs_python_clients, run_client
from support.edge.live_edge import LiveEdge, begin, closed, end, exchange, live_edge, receive, send
from websockets.asyncio.client import ClientConnection, connect
from websockets.typing import Subprotocol

from duplane.edge.payload.sound_format import Encoding, SoundFormat
from duplane.edge.recording.events import join
from duplane.edge.recording.settings import Consent, RecordingSettings
from duplane.edge.recording.storage import read_events, recordings
from duplane.fabric.monitoring.spans import Telemetry
from duplane.fabric.v1 import session_pb2

PATH = "/v1/live/sessions"
KEY = "K-0123456789"
PCM_24K = SoundFormat(Encoding.INT16, 24_000)
PCM_16K = SoundFormat(Encoding.INT16, 16_000)
ULAW = SoundFormat(Encoding.ULAW, 8_000)
ALAW = SoundFormat(Encoding.ALAW, 8_000)
TYPES = {Encoding.INT16: "audio/pcm", Encoding.ULAW: "audio/pcmu", Encoding.ALAW: "audio/pcma"}
FORMATS = [PCM_24K, PCM_16K, ULAW, ALAW]
each_format = pytest.mark.parametrize(
    "sound", FORMATS, ids=lambda sound: f"{sound.suffix}-{sound.rate_hertz}"
)


def tone(rate_hertz: int, seconds: float = 1.0) -> bytes:
    times = np.arange(round(rate_hertz * seconds)) / rate_hertz
    return (0.3 * np.sin(2 * np.pi * 440 * times)).astype("<f4").tobytes()


def speaks_twice(unit: session_pb2.Unit) -> Sequence[session_pb2.ConverseResponse]:
    """Speak in the units 1 and 2, and listen to all others."""
    delta = session_pb2.Delta(sequence=unit.sequence, context_token_count=10)
    delta.listen.SetInParent()
    if unit.sequence in (1, 2):
        delta.speech.text = f"word {unit.sequence} "
        delta.speech.audio = tone(24_000)
    return [session_pb2.ConverseResponse(delta=delta)]


def start(sound: SoundFormat) -> dict[str, Any]:
    form = {"type": TYPES[sound.encoding], "rate": sound.rate_hertz}
    return {"type": "session.start", "session": {"model": "m", "audio": {"format": form}}}


def append(sound: SoundFormat) -> dict[str, Any]:
    audio = pybase64.b64encode(sound.encode(tone(sound.rate_hertz))).decode()
    return {"type": "session.input_audio.append", "audio": audio}


def is_loud(sound: SoundFormat, delta: str) -> bool:
    """Return whether a piece is a tone; the first milliseconds may belong to the piece before."""
    samples = np.frombuffer(sound.decode(pybase64.b64decode(delta)), "<f4")
    return energy(samples) > 0.02 * sound.rate_hertz


async def talk(
    client: ClientConnection, sound: SoundFormat, unit_count: int = 4
) -> list[dict[str, Any]]:
    """Run a session of some units, and return all events."""
    await send(client, start(sound))
    events = [await receive(client)]
    for _ in range(unit_count):
        await send(client, append(sound))
        events.append(await receive(client))
        while events[-1]["type"] != "session.usage.updated":
            events.append(await receive(client))
    await send(client, {"type": "session.close"})
    events.append(await receive(client))
    await closed(client, 1000)
    return events


@pytest.mark.slow
@needs_python_clients
async def test_the_client_of_openai_hears_the_model(tmp_path: Path) -> None:
    sessions: list[str] = []
    for sound in FORMATS:
        file = tmp_path / f"{sound.rate_hertz}.{sound.suffix}"
        file.write_bytes(sound.encode(tone(sound.rate_hertz, 4.0)))
        sessions.append(f"{TYPES[sound.encoding]}:{sound.rate_hertz}:{file}")
    async with live_edge() as edge:
        edge.fabric.on_unit = speaks_twice
        url = f"http://{edge.edge.address}/v1"
        output = await run_client("live.py", url, *sessions)
    for sound, line in zip(FORMATS, output.splitlines(), strict=True):
        told = orjson.loads(line)
        assert told["texts"] == ["word 1 ", "word 2 "]
        loud = [is_loud(sound, piece) for piece in told["pieces"]]
        assert loud == [False, True, True, False]
        assert told["last"]["reason"] == "close_requested"
        assert told["last"]["usage"]["seconds"] == 4


@pytest.mark.parametrize("path", [PATH, f"/openai{PATH}", f"{PATH}?model=anything"])
async def test_browser_offers_a_key_beside_realtime_and_realtime_is_selected(path: str) -> None:
    offered = [Subprotocol("realtime"), Subprotocol(f"openai-insecure-api-key.{KEY}")]
    async with (
        live_edge() as edge,
        connect(
            f"ws://{edge.edge.address}{path}", subprotocols=offered, compression=None, proxy=None
        ) as client,
    ):
        assert client.subprotocol == "realtime"
        events = await talk(client, PCM_24K, 1)
        assert [event["type"] for event in events] == [
            "session.started",
            "session.output_audio.delta",
            "session.usage.updated",
            "session.closed",
        ]


async def test_client_without_a_subprotocol_is_served_too() -> None:
    async with live_edge() as edge, edge.connect_to(PATH) as client:
        assert client.subprotocol is None
        await talk(client, PCM_24K, 1)


async def test_key_reaches_no_log_span_or_recording(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.DEBUG, logger="duplane")
    exported = InMemorySpanExporter()
    telemetry = Telemetry("edge", SimpleSpanProcessor(exported))
    recording = RecordingSettings(tmp_path, Consent.ALWAYS)
    offered = [Subprotocol(f"openai-insecure-api-key.{KEY}"), Subprotocol("realtime")]
    headers = {"Authorization": f"Bearer {KEY}"}
    async with (
        live_edge(telemetry=telemetry, recording=recording) as edge,
        connect(
            f"ws://{edge.edge.address}{PATH}",
            subprotocols=offered,
            additional_headers=headers,
            compression=None,
            proxy=None,
        ) as client,
    ):
        await talk(client, PCM_24K, 1)
    spans = exported.get_finished_spans()
    recorded = await asyncio.to_thread(contents, tmp_path)
    logged = [record for record in caplog.records if record.name != "websockets.client"]
    assert logged
    assert spans
    assert recorded
    assert not [record for record in logged if KEY in record.getMessage()]
    assert not [span for span in spans if KEY in span.to_json()]
    assert KEY.encode() not in recorded


def contents(directory: Path) -> bytes:
    """Return the contents of all files in a directory."""
    return b"".join(path.read_bytes() for path in directory.rglob("*") if path.is_file())


@each_format
async def test_recording_is_audible_and_has_the_sound_as_it_was_sent(
    sound: SoundFormat, tmp_path: Path
) -> None:
    async with live_edge(recording=RecordingSettings(tmp_path, Consent.ALWAYS)) as edge:
        edge.fabric.on_unit = speaks_twice
        async with edge.connect_to(PATH) as client:
            events = await talk(client, sound)
    assert events[0]["session"]["store"] is True
    (directory,) = recordings(tmp_path)
    recorded = list(read_events(directory))
    frames = [
        (event["dir"], join(event["frame"], lambda name: (directory / name).read_bytes()))
        for event in recorded
    ]
    assert [frame for side, frame in frames if side == "down"] == events
    assert frames.count(("up", append(sound))) == 4
    traces = [event["payload_trace"]["audio"] for event in recorded if "payload_trace" in event]
    assert len(traces) == 8
    for trace in traces:
        assert (trace["dtype"], trace["sample_rate"]) == (sound.encoding, sound.rate_hertz)
        assert trace["samples"] == sound.rate_hertz
        assert (directory / trace[f"blob_{sound.suffix}"].removeprefix("@")).exists()
        wav, rate_hertz = soundfile.read(directory / trace["blob_wav"].removeprefix("@"))
        assert (wav.size, rate_hertz) == (sound.rate_hertz, sound.rate_hertz)
    user, user_hertz = soundfile.read(directory / "user.wav")
    model, model_hertz = soundfile.read(directory / "model.wav")
    assert user_hertz == model_hertz == sound.rate_hertz
    power = 0.3**2 / 2  # of the tone
    assert energy(user) == pytest.approx(4 * power * sound.rate_hertz, rel=0.05)
    assert energy(model) == pytest.approx(2 * power * sound.rate_hertz, rel=0.05)
    assert soundfile.info(directory / "replay.wav").channels == 2


def energy(samples: np.ndarray) -> float:
    return float(np.sum(samples.astype(float) ** 2))


async def test_other_sessions_feel_nothing_of_odd_clients() -> None:
    odd = [
        b"{nonsense",
        orjson.dumps({**append(PCM_24K), "audio": "A" * 4099}),
        orjson.dumps({"type": "session.start", "session": {"model": "m", "audio": 7}}),
        orjson.dumps({"type": "response.create"}),
    ]
    async with live_edge(slot_count=len(odd) + 2) as edge, edge.connect() as other:
        await begin(other)
        await _be_odd(edge, odd)
        await exchange(other)
        await end(other)


async def _be_odd(edge: LiveEdge, frames: list[bytes]) -> None:
    for frame in frames:
        async with edge.connect_to(PATH) as client:
            await send(client, start(PCM_24K))
            assert (await receive(client))["type"] == "session.started"
            await client.send(frame, text=True)
            if frame.startswith(b"{n"):
                await closed(client, 1003)
                continue
            assert (await receive(client))["type"] == "error"
            await send(client, {"type": "session.close"})
            assert (await receive(client))["type"] == "session.closed"
