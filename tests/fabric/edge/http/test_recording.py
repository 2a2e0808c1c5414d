"""Recording sessions of a live edge."""

from __future__ import annotations

import asyncio
import io
import shutil
import threading
import urllib.error
import urllib.request
import zipfile
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson
import pybase64
import pytest
import soundfile
from support.edge.live_edge import AUDIO, begin, closed, end, exchange, live_edge, receive, send
from support.protocols.transcripts import pcm
from support.time_limits import WITHIN_S
from websockets.asyncio.client import connect

from duplane.edge.recording.events import join
from duplane.edge.recording.settings import Consent, RecordingSettings
from duplane.edge.recording.storage import Meta, read_events, read_meta, recordings
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
        live_edge(recording=RecordingSettings(tmp_path, Consent.ALWAYS)) as edge,
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
    assert meta.worker == "w"
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
    async with live_edge(recording=RecordingSettings(tmp_path, Consent.ALWAYS)) as edge:
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


@pytest.mark.parametrize("wish", ["on", "off"])
async def test_c_and_d_tell_the_recording_where_one_is_made(tmp_path: Path, wish: str) -> None:
    settings = RecordingSettings(tmp_path, Consent.ON_REQUEST)
    async with live_edge(recording=settings) as edge:
        async with edge.connect_to(f"/ws/duplex/adx_1?recording={wish}") as client:
            assert (await receive(client))["type"] == "queue_done"
            await send(client, {"type": "prepare"})
            told = [await receive(client)]
            await send(client, {"type": "stop"})
            await closed(client, 1000)
        async with edge.connect_to(f"/ws/chat?recording={wish}") as client:
            await send(client, {"messages": [{"role": "user", "content": "Hi"}]})
            while (event := await receive(client))["type"] != "done":
                assert "recording_session_id" not in event
            told.append(event)
    assert [event["type"] for event in told] == ["prepared", "done"]
    named = {event["recording_session_id"] for event in told if "recording_session_id" in event}
    assert named == {directory.name for directory in recordings(tmp_path)}
    assert len(named) == (2 if wish == "on" else 0)


async def test_what_cannot_be_read_is_recorded_as_it_came(tmp_path: Path) -> None:
    nested = b'{"type":' + b"[" * 900 + b"]" * 900 + b"}"
    headers = [("x-client-id", "me"), ("x-client-id", "you")]
    async with (
        live_edge(recording=RecordingSettings(tmp_path, Consent.ALWAYS)) as edge,
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


async def test_only_what_a_session_took_is_heard(tmp_path: Path) -> None:
    adpcm = io.BytesIO()
    soundfile.write(adpcm, np.zeros(16_000), 16_000, format="WAV", subtype="IMA_ADPCM")
    file = pybase64.b64encode(adpcm.getvalue()).decode()
    append = {"type": "input_audio_buffer.append"}
    async with (
        live_edge(recording=RecordingSettings(tmp_path, Consent.ALWAYS)) as edge,
        edge.connect() as client,
    ):
        await begin(client)
        await exchange(client)
        for refused in ({"audio": file}, {"audio": AUDIO, "force_listen": "x"}):
            await send(client, {**append, **refused})
            assert (await receive(client))["type"] == "error"
        await send(client, {**append, "audio": AUDIO, "data": file, "more": {"audio": AUDIO}})
        assert (await receive(client))["type"] == "response.listen"
        await end(client)
    directory, _, _ = only(tmp_path)
    assert soundfile.info(directory / "user.wav").frames == 32_000


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
    settings = RecordingSettings(tmp_path / "recordings", Consent.ALWAYS, queue_bytes=1000)
    async with live_edge(recording=settings) as edge:
        if fault == "no directory":
            shutil.rmtree(settings.directory)
            settings.directory.touch()
        async with edge.connect() as client:
            await begin(client)
            for _ in range(3):
                await exchange(client)
            await end(client)
    if fault == "full queue":
        _, meta, _ = only(settings.directory)
        assert meta.is_incomplete
        assert meta.lost_event_count >= 3


async def test_the_recording_of_a_client_that_vanishes_is_ended(tmp_path: Path) -> None:
    async with live_edge(recording=RecordingSettings(tmp_path, Consent.ALWAYS)) as edge:
        async with edge.connect() as client:
            await begin(client)
            client.transport.abort()
        await edge.settled()
    _, meta, events = only(tmp_path)
    assert meta.close_reason == "gone"
    assert meta.ended_at is not None
    assert len(events) == 3


def download(url: str) -> tuple[int, str, bytes]:
    try:
        with urllib.request.urlopen(url, timeout=WITHIN_S) as response:
            return response.status, response.headers["Content-Type"], response.read()
    except urllib.error.HTTPError as refused:
        return refused.code, "", b""


async def ended(root: Path) -> Path:
    """Wait until the recorder's thread has completely written the only recording."""
    async with asyncio.timeout(WITHIN_S):
        while True:
            for directory in recordings(root):
                if (directory / "replay.wav").exists():
                    return directory
            await asyncio.sleep(0.01)


async def test_operators_find_recordings_over_http(tmp_path: Path) -> None:
    async with live_edge(recording=RecordingSettings(tmp_path, Consent.ALWAYS)) as edge:
        async with edge.connect() as client:
            await begin(client)
            await exchange(client)
            await end(client)
        directory = await ended(tmp_path)
        base = f"http://{edge.edge.address}/api/sessions"

        async def get(path: str) -> tuple[int, str, bytes]:
            return await asyncio.to_thread(download, f"{base}{path}")

        _, kind, body = await get("")
        assert kind.startswith("application/json")
        assert [each["session_id"] for each in orjson.loads(body)["sessions"]] == [directory.name]
        meta = orjson.loads((await get(f"/{directory.name}"))[2])
        assert meta["mode"] == "audio"
        told = orjson.loads((await get(f"/{directory.name}/recording"))[2])
        assert told["session_id"] == directory.name
        _, kind, sound = await get(f"/{directory.name}/assets/user.wav")
        assert (kind, sound[:4]) == ("audio/wav", b"RIFF")
        blob = next(each["frame"]["audio"] for each in told["events"] if "audio" in each["frame"])
        raw = blob.replace(".wav", ".f32")
        assert (await get(f"/{directory.name}/assets/{raw}"))[2] == pcm(16_000)
        _, kind, sound = await get(f"/{directory.name}/assets/{blob}")
        assert (kind, sound[:4]) == ("audio/wav", b"RIFF")
        _, kind, archive = await get(f"/{directory.name}/download")
        assert kind == "application/zip"
        assert zipfile.ZipFile(io.BytesIO(archive)).testzip() is None
        for path in ("/nobody", "/nobody/download", "/..%2f..", f"/{directory.name}/assets/..%2fx"):
            assert (await get(path))[0] == 404, path


async def test_recordings_are_looked_for_off_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[threading.Thread] = []

    def looked(_: Path, name: str) -> None:
        assert name == "nobody"
        seen.append(threading.current_thread())

    for module in ("http.recording_routes", "recording.queries"):
        monkeypatch.setattr(f"duplane.edge.{module}.find_recording", looked)
    async with (
        live_edge(recording=RecordingSettings(tmp_path, Consent.ALWAYS)) as edge,
        edge.asked() as http,
    ):
        for below in ("", "/recording", "/assets/meta.json", "/download", "/comment"):
            assert (await http.ask("GET", f"/api/sessions/nobody{below}"))[0] == 404
        assert (await http.ask("POST", "/api/sessions/nobody/comment", json={}))[0] == 404
        with aiohttp.MultipartWriter("form-data") as form:
            url = "/api/sessions/nobody/upload-recording"
            assert (await http.ask("POST", url, data=form))[0] == 404
    assert len(seen) == 7
    assert threading.main_thread() not in seen


@pytest.mark.parametrize(
    ("asked", "status", "begin_at", "end_at"),
    [
        (None, 200, 0, 600_000),
        ("bytes=10-19", 206, 10, 20),
        ("bytes=599990-", 206, 599_990, 600_000),
        ("bytes=-5", 206, 599_995, 600_000),
        ("bytes=5-900000", 206, 5, 600_000),
        ("bytes=600000-", 416, 0, 0),
        ("nonsense", 416, 0, 0),
    ],
)
async def test_a_part_of_a_file_can_be_asked_for(
    tmp_path: Path, asked: str | None, status: int, begin_at: int, end_at: int
) -> None:
    content = bytes(range(256)) * 2344
    content = content[:600_000]
    (tmp_path / "sess_0").mkdir()
    (tmp_path / "sess_0/stream.jsonl").touch()
    (tmp_path / "sess_0/user.wav").write_bytes(content)
    async with (
        live_edge(recording=RecordingSettings(tmp_path, Consent.ALWAYS)) as edge,
        aiohttp.ClientSession() as http,
    ):
        url = f"http://{edge.edge.address}/api/sessions/sess_0/assets/user.wav"
        async with http.get(url, headers={"Range": asked} if asked else {}) as answer:
            assert answer.status == status
            if status == 416:
                return
            told = await answer.read()
        assert told == content[begin_at:end_at]
        assert answer.headers["Content-Length"] == str(len(told))
        whole = f"bytes {begin_at}-{end_at - 1}/600000" if asked else None
        assert answer.headers.get("Content-Range") == whole
        assert answer.headers["Content-Type"] == "audio/wav"


async def test_others_find_no_recordings(tmp_path: Path) -> None:
    async with live_edge(
        recording=RecordingSettings(tmp_path, Consent.ALWAYS), admin_token="secret"
    ) as edge:
        for path in ("", "/x", "/x/recording", "/x/assets/meta.json", "/x/download"):
            assert (await edge.get(f"/api/sessions{path}"))[0] == 403, path


async def test_without_recording_there_are_no_sessions() -> None:
    async with live_edge() as edge:
        assert await edge.get("/api/sessions") == (200, {"total": 0, "sessions": []})
        assert (await edge.get("/api/sessions/x/recording"))[0] == 404
