"""Dialect E on a live edge: the upgrade beside A and B, keys in subprotocols, the recording."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pybase64
import pytest
import soundfile
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from support.edge.live_edge import LiveEdge, begin, closed, end, exchange, live_edge, receive, send
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus
from websockets.typing import Subprotocol

from duplane.edge.payload.sound_format import Encoding, SoundFormat
from duplane.edge.recording.events import join
from duplane.edge.recording.settings import Consent, RecordingSettings
from duplane.edge.recording.storage import read_events, recordings
from duplane.fabric.monitoring.spans import Telemetry
from duplane.fabric.v1 import session_pb2

PATH = "/v1/realtime?model=gpt-realtime-2.1"
KEY = "K-0123456789"
BEARER = {"Authorization": f"Bearer {KEY}"}
PCM = SoundFormat(Encoding.INT16, 24_000)
ULAW = SoundFormat(Encoding.ULAW, 8_000)
ALAW = SoundFormat(Encoding.ALAW, 8_000)
FORMS: Mapping[Encoding, Mapping[str, object]] = {
    Encoding.INT16: {"type": "audio/pcm", "rate": 24_000},
    Encoding.ULAW: {"type": "audio/pcmu"},
    Encoding.ALAW: {"type": "audio/pcma"},
}
LONG = pybase64.b64encode_as_string(bytes(15 * 1024 * 1024))  # as much as OpenAI accepts
CLEAR = {"type": "input_audio_buffer.clear"}
TURN = [
    "response.created",
    "response.output_item.added",
    "conversation.item.added",
    "response.content_part.added",
    *(2 * ["response.output_audio_transcript.delta", "response.output_audio.delta"]),
    "response.output_audio.done",
    "response.output_audio_transcript.done",
    "response.content_part.done",
    "conversation.item.done",
    "response.output_item.done",
    "response.done",
]


def tone(rate_hertz: int) -> bytes:
    """Return a second of sound."""
    times = np.arange(rate_hertz) / rate_hertz
    return (0.3 * np.sin(2 * np.pi * 440 * times)).astype("<f4").tobytes()


def speaks_twice(unit: session_pb2.Unit) -> Sequence[session_pb2.ConverseResponse]:
    """Speak in the units 1 and 2, and listen to all others."""
    delta = session_pb2.Delta(sequence=unit.sequence, context_token_count=10)
    delta.listen.SetInParent()
    if unit.sequence in (1, 2):
        delta.speech.text = f"word {unit.sequence} "
        delta.speech.audio = tone(24_000)
        delta.end_of_turn = unit.sequence == 2
    return [session_pb2.ConverseResponse(delta=delta)]


def append(sound: SoundFormat) -> dict[str, Any]:
    audio = pybase64.b64encode(sound.encode(tone(sound.rate_hertz))).decode()
    return {"type": "input_audio_buffer.append", "audio": audio}


def to(
    edge: LiveEdge, path: str = PATH, headers: Mapping[str, str] = BEARER, *offered: str
) -> connect:
    """Connect as a client of OpenAI does."""
    return connect(
        f"ws://{edge.edge.address}{path}",
        additional_headers=headers,
        subprotocols=[Subprotocol(name) for name in offered] or None,
        compression=None,
        proxy=None,
    )


async def created(client: ClientConnection) -> dict[str, Any]:
    event = await receive(client)
    assert event["type"] == "session.created", event
    return event


async def talk(client: ClientConnection, sound: SoundFormat = PCM) -> list[dict[str, Any]]:
    """Run a session of one turn, and return all events."""
    events = [await created(client)]
    form = FORMS[sound.encoding]
    settings = {
        "type": "realtime",
        "audio": {"input": {"format": form}, "output": {"format": form}},
    }
    await send(client, {"type": "session.update", "session": settings})
    for _ in range(3):
        await send(client, append(sound))
    while events[-1]["type"] != "response.done":
        events.append(await receive(client))
    await client.close()
    return events


async def test_each_client_gets_its_own_dialect_at_one_url() -> None:
    async with (
        live_edge(slot_count=4) as edge,
        to(edge) as openai,
        to(edge, "/v1/realtime", {}, "realtime", f"openai-insecure-api-key.{KEY}") as browser,
        to(edge, "/v1/realtime?mode=audio&model=m") as a,
        to(edge, "/v1/realtime?mode=audio", {}, "map.realtime", "realtime") as b,
    ):
        assert [client.subprotocol for client in (openai, browser, a, b)] == [
            None,
            "realtime",
            None,
            "map.realtime",
        ]
        session = (await created(openai))["session"]
        assert session["model"] == "gpt-realtime-2.1"
        assert (await created(browser))["session"]["model"] == ""
        await begin(a)
        await exchange(a)
        await end(a)
        assert (await receive(b))["type"] == "session.queue_done"
        await send(b, {"type": "session.init", "payload": {}})
        assert (await receive(b))["type"] == "session.created"
        await send(b, {"type": "session.close", "reason": "x"})
        assert (await receive(b))["type"] == "session.closed"
        for client in (openai, browser):
            await send(client, CLEAR)
            assert (await receive(client))["type"] == "input_audio_buffer.cleared"


@pytest.mark.parametrize("query", ["call_id=c", "model=m&intent=transcription"])
async def test_calls_and_transcriptions_are_refused_before_the_websocket(query: str) -> None:
    async with live_edge() as edge:
        with pytest.raises(InvalidStatus) as refusal:
            async with to(edge, f"/v1/realtime?{query}"):
                pass
    assert refusal.value.response.status_code == 400
    assert query.rpartition("&")[2].partition("=")[0] in refusal.value.response.body.decode()


@pytest.mark.parametrize("path", [PATH, "/openai/v1/realtime", "/realtime?model=m"])
async def test_a_turn_of_the_model_is_a_response(path: str) -> None:
    async with live_edge() as edge, to(edge, path) as client:
        edge.fabric.on_unit = speaks_twice
        events = await talk(client)
    assert [event["type"] for event in events] == ["session.created", "session.updated", *TURN]
    assert events[-1]["response"]["output"][0]["content"] == [
        {"type": "output_audio", "transcript": "word 1 word 2 "}
    ]


async def test_key_reaches_no_log_span_or_recording(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.DEBUG, logger="duplane")
    exported = InMemorySpanExporter()
    telemetry = Telemetry("edge", SimpleSpanProcessor(exported))
    recording = RecordingSettings(tmp_path, Consent.ALWAYS)
    offered = (f"openai-insecure-api-key.{KEY}", "realtime", "openai-agents-sdk.0.20.0")
    async with (
        live_edge(telemetry=telemetry, recording=recording) as edge,
        to(edge, PATH, BEARER, *offered) as client,
    ):
        edge.fabric.on_unit = speaks_twice
        assert client.subprotocol == "realtime"
        await talk(client)
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


@pytest.mark.parametrize("sound", [PCM, ULAW, ALAW], ids=lambda sound: sound.suffix)
async def test_recording_is_audible_and_has_the_sound_as_it_was_sent(
    sound: SoundFormat, tmp_path: Path
) -> None:
    async with live_edge(recording=RecordingSettings(tmp_path, Consent.ALWAYS)) as edge:
        edge.fabric.on_unit = speaks_twice
        async with to(edge) as client:
            events = await talk(client, sound)
    (directory,) = recordings(tmp_path)
    recorded = list(read_events(directory))
    frames = [
        (event["dir"], join(event["frame"], lambda name: (directory / name).read_bytes()))
        for event in recorded
    ]
    assert [frame for side, frame in frames if side == "down"] == events
    assert frames.count(("up", append(sound))) == 3
    traces = [event["payload_trace"]["audio"] for event in recorded if "payload_trace" in event]
    assert len(traces) == 5
    for trace in traces:
        assert (trace["dtype"], trace["sample_rate"]) == (sound.encoding, sound.rate_hertz)
    power = 0.3**2 / 2  # of the tone
    for name, count in (("user", 3), ("model", 2)):
        samples, rate_hertz = soundfile.read(directory / f"{name}.wav")
        assert rate_hertz == sound.rate_hertz
        energy = float(np.sum(samples.astype(float) ** 2))
        assert energy == pytest.approx(count * power * sound.rate_hertz, rel=0.05)


async def test_other_sessions_feel_nothing_of_odd_clients() -> None:
    odd = [
        (b"{nonsense", 1003),
        (orjson.dumps({**append(PCM), "audio": "A" * 4099}), 0),
        (orjson.dumps({**append(PCM), "audio": LONG}), 0),
        (orjson.dumps({"type": "session.update", "session": {"audio": 7}}), 0),
        (orjson.dumps({"type": "unheard.of"}), 0),
    ]
    async with live_edge(slot_count=len(odd) + 2) as edge, edge.connect() as other:
        await begin(other)
        for frame, code in odd:
            async with to(edge) as client:
                await created(client)
                await client.send(frame, text=True)
                if code:
                    await closed(client, code)
                    continue
                assert (await receive(client))["type"] == "error"
                await send(client, CLEAR)
                assert (await receive(client))["type"] == "input_audio_buffer.cleared"
        await exchange(other)
        await end(other)
