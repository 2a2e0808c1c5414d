"""Reference voices: uploads of operators to a live edge, and voices that clients send."""

from __future__ import annotations

import io
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pybase64
import pytest
import soundfile
from support.edge.live_edge import Asked, live_edge, receive, send

from duplane.edge.payload import media
from duplane.edge.payload.media import decode_audio
from duplane.edge.settings import Limits
from duplane.fabric.audio import read_client_wav
from duplane.fabric.process import StartError

URL = "/api/assets/ref_audio"
ROW = {"id", "name", "filename", "source_type", "duration_ms", "sample_rate", "created_at"}


def sound(seconds: float = 1.0, rate: int = 16_000, channels: int = 1, kind: str = "WAV") -> str:
    content = io.BytesIO()
    wave = np.sin(np.arange(round(seconds * rate)) * 440 * 2 * np.pi / rate)
    samples = np.repeat(wave.astype(np.float32)[:, None], channels, axis=1)
    soundfile.write(content, samples, rate, format=kind)
    return pybase64.b64encode(content.getvalue()).decode()


def files(directory: Path, pattern: str = "*") -> set[str]:
    return {path.name for path in directory.glob(pattern)}


async def upload(http: Asked, name: str = "Anna", **more: Any) -> tuple[int, dict[str, Any]]:
    return await http.ask("POST", URL, json={"name": name, "audio_base64": sound(), **more})


async def test_a_voice_is_uploaded_listed_fetched_and_deleted(tmp_path: Path) -> None:
    async with live_edge(ref_audio=tmp_path) as edge, edge.asked() as http:
        assert await http.get(URL) == {"total": 0, "ref_audios": []}
        stereo = sound(0.5, rate=48_000, channels=2)
        code, told = await upload(http, audio_base64=stereo)
        message = "Uploaded successfully, duration=500ms"
        voice_id = told["id"]
        expected = {"success": True, "id": voice_id, "name": "Anna", "message": message}
        assert (code, told) == (200, expected)
        listed = await http.get(URL)
        assert listed["total"] == 1
        (row,) = listed["ref_audios"]
        assert row.keys() == ROW
        assert (row["id"], row["name"], row["source_type"]) == (voice_id, "Anna", "upload")
        assert (row["duration_ms"], row["sample_rate"]) == (500, 16_000)
        age = datetime.now(UTC) - datetime.fromisoformat(row["created_at"])
        assert 0 <= age.total_seconds() < 60
        kept = soundfile.info(tmp_path / row["filename"])
        assert (kept.samplerate, kept.channels, kept.subtype) == (16_000, 1, "PCM_16")
        fetched = await http.get(f"{URL}/{voice_id}")
        assert fetched.keys() == {"name", "duration", "sample_rate", "samples", "base64"}
        assert (fetched["name"], fetched["samples"]) == ("Anna", 8000)
        samples = np.frombuffer(pybase64.b64decode(fetched["base64"]), "<f4")
        assert samples.size == 8000
        assert abs(float(np.abs(samples).max()) - 1) < 0.01
        code, told = await http.ask("DELETE", f"{URL}/{voice_id}")
        assert (code, told) == (200, {**expected, "message": "Deleted"})
        assert await http.get(URL) == {"total": 0, "ref_audios": []}
        assert not files(tmp_path, "*.wav")
        for method in ("DELETE", "GET"):
            code, told = await http.ask(method, f"{URL}/{voice_id}")
            assert (code, told) == (404, {"detail": f"Ref audio not found: {voice_id}"})


async def test_voices_are_kept_over_a_restart_and_shared_by_edges(tmp_path: Path) -> None:
    async with live_edge(ref_audio=tmp_path) as edge, edge.asked() as http:
        first = (await upload(http))[1]["id"]
        async with live_edge(ref_audio=tmp_path) as other, other.asked() as there:
            second = (await upload(there, "Ben"))[1]["id"]
        told = await http.get(URL)
        assert [row["id"] for row in told["ref_audios"]] == [first, second]


@pytest.mark.parametrize(
    ("body", "code", "named"),
    [
        (b"", 400, "JSON"),
        (b"[]", 422, "object"),
        ({"audio_base64": sound()}, 422, "name"),
        ({"name": "", "audio_base64": sound()}, 422, "name"),
        ({"name": "x" * 257, "audio_base64": sound()}, 422, "name"),
        ({"name": "x"}, 422, "audio_base64"),
        ({"name": "x", "audio_base64": 3}, 422, "audio_base64"),
        ({"name": "x", "audio_base64": "%"}, 400, "audio_base64"),
        ({"name": "x", "audio_base64": "AAAA"}, 400, "audio_base64"),
        ({"name": "x", "audio_base64": sound(0)}, 400, "audio_base64"),
        ({"name": "x", "audio_base64": sound(kind="FLAC")}, 400, "not a readable WAV"),
        ({"name": "x", "audio_base64": sound(2.01)}, 400, "audio_base64"),
        ({"name": "x", "audio_base64": sound(4, rate=96_000)}, 413, "200000"),
    ],
)
async def test_what_is_no_voice_is_refused_by_name(
    tmp_path: Path, body: object, code: int, named: str
) -> None:
    limits = Limits(ref_audio_s=2.0, ref_audio_bytes=200_000)
    async with live_edge(limits, ref_audio=tmp_path) as edge, edge.asked() as http:
        content = body if isinstance(body, bytes) else orjson.dumps(body)
        refused, told = await http.ask("POST", URL, data=content)
        assert refused == code
        assert named.lower() in told["detail"].lower()
        assert (await http.get(URL))["total"] == 0
        assert files(tmp_path) == {".lock"}


@pytest.mark.parametrize(
    "limits",
    [Limits(ref_audio_count=2), Limits(ref_audio_total_bytes=2 * 32_044)],
    ids=["count", "size"],
)
async def test_a_full_shelf_takes_no_more_until_there_is_room(
    tmp_path: Path, limits: Limits
) -> None:
    async with live_edge(limits, ref_audio=tmp_path) as edge, edge.asked() as http:
        assert [(await upload(http))[0] for _ in range(3)] == [200, 200, 507]
        (first, _) = (await http.get(URL))["ref_audios"]
        assert (await http.ask("DELETE", f"{URL}/{first['id']}"))[0] == 200
        assert (await upload(http))[0] == 200
        assert len(files(tmp_path, "*.wav")) == 2


async def test_only_operators_upload_and_delete(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"ref_audio": tmp_path, "admin_token": "secret"}
    async with live_edge(**settings) as edge, edge.asked() as http:
        assert (await upload(http))[0] == 403
        assert (await http.ask("DELETE", f"{URL}/x"))[0] == 403
        assert (await http.get(URL))["total"] == 0


async def test_without_a_directory_there_are_none() -> None:
    async with live_edge() as edge, edge.asked() as http:
        assert await http.get(URL) == {"total": 0, "ref_audios": []}
        for asked in (upload(http), http.ask("DELETE", f"{URL}/x")):
            code, told = await asked
            assert (code, told["detail"]) == (
                404,
                "this edge stores no reference audio: see --ref-audio",
            )
        assert (await http.ask("GET", f"{URL}/x"))[0] == 404


@pytest.mark.parametrize("content", ["{", "3", '[{"id":"x"}]', "[3]"])
async def test_an_edge_does_not_start_on_a_broken_index(tmp_path: Path, content: str) -> None:
    (tmp_path / "registry.json").write_text(content)
    with pytest.raises(StartError, match="ref_audio"):
        async with live_edge(ref_audio=tmp_path):
            pass


async def test_a_disk_that_fails_is_told(tmp_path: Path) -> None:
    async with live_edge(ref_audio=tmp_path) as edge, edge.asked() as http:
        voice_id = (await upload(http))[1]["id"]
        (tmp_path / f"{voice_id}.wav").write_bytes(b"nothing")
        assert (await http.ask("GET", f"{URL}/{voice_id}"))[0] == 500
        (tmp_path / "registry.json").write_text("{")
        assert (await http.ask("GET", URL))[0] == 500
        assert (await upload(http))[0] == 500
        assert (await http.ask("GET", "/health"))[0] == 200


async def test_a_long_voice_is_decoded_where_no_other_session_feels_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoded_in: list[str] = []

    def read(*arguments: Any, **options: Any) -> Any:
        decoded_in.append(threading.current_thread().name)
        return read_client_wav(*arguments, **options)

    long = sound(20.0, rate=48_000)
    expected = decode_audio(long, "x", 60.0)
    monkeypatch.setattr(media, "read_client_wav", read)
    ask = {"messages": [{"role": "user", "content": [{"type": "audio", "data": long}]}]}
    async with live_edge() as edge:
        async with edge.connect() as client:
            await receive(client)
            session = {"instructions": "x", "ref_audio": long}
            await send(client, {"type": "session.update", "session": session})
            assert (await receive(client))["type"] == "session.created"
            opened = await (await edge.fabric.conversation()).next_request()
            assert opened.open.llm_voice == expected
        async with edge.connect_to("/ws/duplex/adx_1") as client:
            await receive(client)
            await send(client, {"type": "prepare", "ref_audio_base64": long})
            assert (await receive(client))["type"] == "prepared"
            opened = await (await edge.fabric.conversation()).next_request()
            assert opened.open.llm_voice == expected
        async with edge.connect_to("/ws/chat") as client:
            await send(client, ask)
            assert (await edge.fabric.turn()).request.messages[0].parts[0].audio == expected
            while (await receive(client))["type"] != "done":
                pass
    assert len(decoded_in) == 3
    assert threading.main_thread().name not in decoded_in


async def test_a_voice_that_is_too_long_is_refused_all_the_same() -> None:
    async with live_edge() as edge, edge.connect() as client:
        await receive(client)
        session = {"instructions": "x", "ref_audio": sound(31.0)}
        await send(client, {"type": "session.update", "session": session})
        told = (await receive(client))["error"]
        assert (told["code"], told["message"]) == (
            "invalid_payload",
            "session.ref_audio: lasts 31 s, more than 30 s",
        )
