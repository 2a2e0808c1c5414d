"""Operators add comments and uploads to the recordings of a live edge."""

from __future__ import annotations

import asyncio
import contextlib
import io
import zipfile
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.edge.live_edge import Asked, begin, end, live_edge
from support.time_limits import WITHIN_S

from duplane.edge.recording.retention import sweep
from duplane.edge.recording.settings import Consent, RecordingSettings
from duplane.edge.recording.storage import is_running, recordings

URL = "/api/sessions"


@contextlib.asynccontextmanager
async def recorded(root: Path, **settings: Any) -> AsyncGenerator[tuple[Asked, Path]]:
    """Yield an HTTP client of an edge with one recorded session, and the recording's directory."""
    recording = RecordingSettings(root, Consent.ALWAYS, **settings)
    async with live_edge(recording=recording) as edge, edge.asked() as http:
        async with edge.connect() as client:
            await begin(client)
            await end(client)
        async with asyncio.timeout(WITHIN_S):
            while not (ended := [each for each in recordings(root) if not is_running(each)]):
                await http.get("/health")
        yield http, ended[0]


def form(content: bytes, kind: str = "video/webm", field: str = "file") -> aiohttp.FormData:
    made = aiohttp.FormData()
    made.add_field("about", "a page", content_type="text/plain")
    made.add_field(field, io.BytesIO(content), filename="recording.webm", content_type=kind)
    return made


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


async def test_a_comment_is_kept_and_taken_back(tmp_path: Path) -> None:
    async with recorded(tmp_path) as (http, directory):
        url = f"{URL}/{directory.name}/comment"
        assert await http.get(url) == {"comment": ""}
        for said, kept in ((" héllo\n", "héllo"), ("x" * 2000, "x" * 2000), ("", ""), (None, "")):
            told = await http.ask("POST", url, json={"comment": said})
            assert told == (200, {"status": "ok", "len": len(kept)})
            assert await http.get(url) == {"comment": kept}
        assert await http.ask("POST", url, json={}) == (200, {"status": "ok", "len": 0})
        assert "comment.txt" not in names(directory)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"{", 400),
        (b'{"comment":3}', 400),
        (b'{"comment":["x"]}', 400),
        (b'["x"]', 422),
        (b'{"comment":"' + b"x" * 2001 + b'"}', 413),
        (b'{"comment":"' + b"x" * 70_000 + b'"}', 413),
    ],
)
async def test_what_is_no_comment_is_refused(tmp_path: Path, body: bytes, code: int) -> None:
    async with recorded(tmp_path) as (http, directory):
        url = f"{URL}/{directory.name}/comment"
        await http.ask("POST", url, json={"comment": "before"})
        refused, told = await http.ask("POST", url, data=body)
        assert (refused, told.keys()) == (code, {"detail"})
        assert await http.get(url) == {"comment": "before"}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("video/webm", "frontend_replay.webm"),
        ("audio/webm;codecs=opus", "frontend_replay.webm"),
        ("video/mp4", "frontend_replay.mp4"),
        ("audio/wav", "frontend_replay.wav"),
    ],
)
async def test_an_upload_is_kept_with_the_recording(tmp_path: Path, kind: str, name: str) -> None:
    content = bytes(range(256)) * 4000  # long enough to arrive in several pieces
    async with recorded(tmp_path) as (http, directory):
        url = f"{URL}/{directory.name}"
        for sent in (b"before", content):
            told = await http.ask("POST", f"{url}/upload-recording", data=form(sent, kind))
            assert told == (200, {"status": "ok", "path": name, "size_bytes": len(sent)})
        assert (directory / name).read_bytes() == content
        assert not {each for each in names(directory) if "part" in each}
        async with aiohttp.ClientSession() as client:
            base = f"http://{http.address}{url}"
            async with client.get(f"{base}/assets/{name}") as told:
                assert told.headers["Content-Type"].split("/")[1] in ("webm", "mp4", "wav")
                assert told.headers["X-Content-Type-Options"] == "nosniff"
                assert await told.read() == content
            async with client.head(f"{base}/assets/{name}") as told:
                assert (told.status, told.content_length) == (200, len(content))
            async with client.get(f"{base}/download") as told:
                archive = zipfile.ZipFile(io.BytesIO(await told.read()))
                assert f"{directory.name}/{name}" in archive.namelist()


async def test_an_upload_may_be_as_large_as_its_bound(tmp_path: Path) -> None:
    async with recorded(tmp_path, upload_bytes=300_000) as (http, directory):
        url = f"{URL}/{directory.name}/upload-recording"
        assert (await http.ask("POST", url, data=form(bytes(300_000))))[0] == 200

        async def pieces(content: bytes):
            yield content

        for size in (300_001, 2_000_000):
            code, told = await http.ask("POST", url, data=form(bytes(size)))
            assert (code, told["detail"]) == (413, "file: must be at most 300000 bytes")
            whole = aiohttp.MultipartWriter("form-data")
            part = whole.append(pieces(bytes(size)), {"Content-Type": "video/webm"})
            part.set_content_disposition("form-data", name="file", filename="x")
            assert (await http.ask("POST", url, data=whole))[0] == 413
        assert (directory / "frontend_replay.webm").stat().st_size == 300_000
        assert not {each for each in names(directory) if "part" in each}


@pytest.mark.parametrize(
    ("content", "kind", "code"),
    [
        (form(b"x", "text/html"), None, 400),
        (form(b"x", field="other"), None, 422),
        (form(b""), None, 400),
        (b"x", "video/webm", 415),
        (b"x", "multipart/form-data", 400),
        (b"x", "multipart/form-data; boundary=b", 400),
        (b"--b\r\n", "multipart/form-data; boundary=b", 400),
        (b"--b\r\nnonsense\r\n\r\nx", "multipart/form-data; boundary=b", 400),
        (b"--b--\r\n", "multipart/form-data; boundary=b", 422),
        (
            b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n'
            b"Content-Type: video/webm\r\n\r\nnever ends",
            "multipart/form-data; boundary=b",
            400,
        ),
        (
            b"--b\r\nContent-Type: multipart/mixed; boundary=c\r\n\r\n"
            b"--c\r\n\r\nx\r\n--c--\r\n--b--\r\n",
            "multipart/form-data; boundary=b",
            422,
        ),
    ],
)
async def test_what_is_no_upload_is_refused(
    tmp_path: Path, content: Any, kind: str | None, code: int
) -> None:
    async with recorded(tmp_path) as (http, directory):
        before = names(directory)
        headers = {"Content-Type": kind} if kind else {}
        url = f"{URL}/{directory.name}/upload-recording"
        refused, told = await http.ask("POST", url, data=content, headers=headers)
        assert (refused, told.keys()) == (code, {"detail"})
        assert names(directory) == before


async def test_an_upload_that_takes_too_long_or_stops_leaves_nothing(tmp_path: Path) -> None:
    begun = (
        b"POST /api/sessions/%s/upload-recording HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Length: 9999\r\nContent-Type: multipart/form-data; boundary=b\r\n\r\n--b\r\n"
        b'Content-Disposition: form-data; name="file"; filename="f"\r\n'
        b"Content-Type: video/webm\r\n\r\n" + b"x" * 5000
    )
    async with recorded(tmp_path, upload_s=0.3) as (http, directory):
        before = names(directory)
        host, _, port = http.address.rpartition(":")
        for is_leaving in (False, True):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(begun % directory.name.encode())
            await writer.drain()
            if not is_leaving:
                async with asyncio.timeout(WITHIN_S):
                    assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
            writer.close()
            async with asyncio.timeout(WITHIN_S):
                while names(directory) != before:
                    await http.get("/health")


async def test_additions_to_what_is_not_there_are_refused(tmp_path: Path) -> None:
    async with recorded(tmp_path) as (http, _):
        for name in ("nobody", "..%2f..", "%2e%2e"):
            for path, body in (
                ("comment", {"json": {}}),
                ("upload-recording", {"data": form(b"x")}),
            ):
                code, _ = await http.ask("POST", f"{URL}/{name}/{path}", **body)
                assert code == 404, (name, path)
            assert (await http.ask("GET", f"{URL}/{name}/comment"))[0] == 404


async def test_only_operators_add_to_recordings(tmp_path: Path) -> None:
    settings = RecordingSettings(tmp_path, Consent.ALWAYS)
    async with (
        live_edge(recording=settings, admin_token="secret") as edge,
        edge.asked() as http,
    ):
        for path in ("comment", "upload-recording"):
            assert (await http.ask("POST", f"{URL}/x/{path}"))[0] == 403
        assert (await http.ask("GET", f"{URL}/x/comment"))[0] == 403
    async with live_edge() as edge, edge.asked() as http:
        assert (await http.ask("POST", f"{URL}/x/comment", json={}))[0] == 404


async def test_additions_count_for_how_long_recordings_stay(tmp_path: Path) -> None:
    bound = RecordingSettings(tmp_path, Consent.ALWAYS, max_total_bytes=50_000)
    async with recorded(tmp_path) as (http, directory):
        url = f"{URL}/{directory.name}/upload-recording"
        assert (await http.ask("POST", url, data=form(bytes(50_000))))[0] == 200
    (directory / "frontend_replay.webm").rename(tmp_path / "elsewhere")
    assert not sweep(bound, 0.0)
    (tmp_path / "elsewhere").rename(directory / "frontend_replay.webm")
    assert sweep(bound, 0.0) == [directory.name]
