"""Recording sessions of a live edge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import soundfile
from edge_transcripts import pcm
from live_edge import AUDIO, begin, closed, end, exchange, live_edge, receive, send
from websockets.asyncio.client import connect

from duplane.edge.recording.events import join
from duplane.edge.recording.settings import Consent, RecordingSettings
from duplane.edge.recording.shelf import Meta, read_events, read_meta, recordings
from duplane.fabric.v1 import session_pb2


def only(root: Path) -> tuple[Path, Meta, list[dict[str, Any]]]:
    (directory,) = recordings(root)
    meta = read_meta(directory)
    assert meta
    return directory, meta, list(read_events(directory))


def spoken(unit: session_pb2.Unit) -> list[session_pb2.ConverseResponse]:
    speech = session_pb2.Speech(text="so", audio=pcm(24_000))
    delta = session_pb2.Delta(sequence=unit.sequence, speech=speech, end_of_turn=True)
    return [session_pb2.ConverseResponse(delta=delta)]


async def test_a_session_of_dialect_a_is_recorded_whole(tmp_path: Path) -> None:
    heard: list[dict[str, Any]] = []
    async with (
        live_edge(recording=RecordingSettings(tmp_path)) as edge,
        edge.connect("?mode=audio&client_id=me") as client,
    ):
        assert (await receive(client))["type"] == "session.queue_done"
        update = {"type": "session.update", "session": {"instructions": "Be brief."}}
        await send(client, update)
        created = await receive(client)
        heard.append(await exchange(client))
        edge.fabric.on_unit = spoken
        await send(client, {"type": "input_audio_buffer.append", "audio": AUDIO})
        heard.append(await receive(client))
        await end(client)
    directory, meta, events = only(tmp_path)
    assert created["recording_session_id"] == directory.name == meta.session_id
    assert (meta.dialect, meta.mode, meta.close_reason) == ("A", "audio", "client")
    assert meta.identity["client_id"] == "me"
    assert meta.identity["realtime_id"] == created["session_id"]
    assert meta.worker
    assert not meta.is_incomplete
    assert [(event["dir"], event["frame"]["type"]) for event in events] == [
        ("down", "session.queue_done"),
        ("up", "session.update"),
        ("down", "session.created"),
        ("up", "input_audio_buffer.append"),
        ("down", "response.listen"),
        ("up", "input_audio_buffer.append"),
        ("down", "response.output_audio.delta"),
        ("up", "session.close"),
        ("down", "session.closed"),
    ]
    frames = [
        join(event["frame"], lambda name: (directory / name).read_bytes()) for event in events
    ]
    assert [frames[4], frames[6]] == heard
    assert soundfile.info(directory / "user.wav").frames == 32_000
    assert soundfile.info(directory / "model.wav").frames == 24_000
    assert soundfile.info(directory / "replay.wav").channels == 2


async def test_a_session_of_dialect_b_is_recorded_whole(tmp_path: Path) -> None:
    async with live_edge(recording=RecordingSettings(tmp_path)) as edge:
        edge.fabric.on_unit = spoken
        async with edge.connect() as client:
            assert (await receive(client))["type"] == "session.queue_done"
            await send(client, {"type": "session.init", "payload": {"system_prompt": "Be brief."}})
            created = await receive(client)
            await send(client, {"type": "input.append", "input": {"audio": AUDIO}})
            kinds = [(await receive(client))["kind"] for _ in range(3)]
            await send(client, {"type": "session.close", "reason": "done"})
            assert (await receive(client))["reason"] == "done"
            await closed(client, 1000)
    assert kinds == ["text", "audio", "listen"]
    directory, meta, events = only(tmp_path)
    assert created["recording_session_id"] == created["session_id"] == directory.name
    assert meta.dialect == "B"
    assert len(events) == 9
    assert soundfile.info(directory / "user.wav").frames == 16_000
    assert soundfile.info(directory / "model.wav").frames == 24_000


async def test_what_cannot_be_read_is_recorded_as_it_came(tmp_path: Path) -> None:
    nested = b'{"type":' + b"[" * 900 + b"]" * 900 + b"}"
    headers = [("x-client-id", "me"), ("x-client-id", "you")]
    async with (
        live_edge(recording=RecordingSettings(tmp_path)) as edge,
        connect(edge.url(), additional_headers=headers, proxy=None) as client,
    ):
        await begin(client)
        for frame in (nested, b"{nonsense"):
            await client.send(frame, text=True)
        await closed(client, 1003)
    directory, meta, events = only(tmp_path)
    assert not meta.is_incomplete
    frames = [event["frame"] for event in events if event["dir"] == "up"][1:]
    assert [(directory / frame[1:]).read_bytes() for frame in frames] == [nested, b"{nonsense"]


async def test_nothing_is_recorded_unless_it_is_switched_on() -> None:
    async with live_edge() as edge, edge.connect("?mode=audio&recording=on") as client:
        assert (await receive(client))["type"] == "session.queue_done"
        await send(client, {"type": "session.update", "session": {"instructions": "x"}})
        assert "recording_session_id" not in await receive(client)
        await end(client)


async def test_a_client_may_refuse_where_the_server_lets_it(tmp_path: Path) -> None:
    settings = RecordingSettings(tmp_path, Consent.UNLESS_REFUSED)
    async with (
        live_edge(recording=settings) as edge,
        edge.connect("?mode=audio&recording=off") as client,
    ):
        await begin(client)
        await end(client)
    assert not recordings(tmp_path)


@pytest.mark.parametrize("fault", ["full queue", "no directory"])
async def test_a_session_goes_on_whatever_its_recording_does(tmp_path: Path, fault: str) -> None:
    (tmp_path / "file").touch()
    settings = RecordingSettings(
        tmp_path / ("file" if fault == "no directory" else "recordings"), queue_bytes=1000
    )
    async with live_edge(recording=settings) as edge, edge.connect() as client:
        await begin(client)
        for _ in range(3):
            await exchange(client)
        await end(client)
    if fault == "full queue":
        _, meta, _ = only(settings.directory)
        assert meta.is_incomplete
        assert meta.lost_event_count >= 3


async def test_the_recording_of_a_client_that_vanishes_is_ended(tmp_path: Path) -> None:
    async with live_edge(recording=RecordingSettings(tmp_path)) as edge:
        async with edge.connect() as client:
            await begin(client)
            client.transport.abort()
        await edge.settled()
    _, meta, events = only(tmp_path)
    assert meta.close_reason == "gone"
    assert meta.ended_at is not None
    assert len(events) == 3
