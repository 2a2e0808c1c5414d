"""Answers to HTTP queries about recordings."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import orjson
import pytest

from duplane.edge.recording.queries import (
    session_archive,
    session_asset,
    session_list,
    session_meta,
    session_recording,
)
from duplane.edge.recording.storage import Meta, write_meta


def put(root: Path, name: str, created_at: float = 1000.0) -> Path:
    directory = root / name
    (directory / "blob").mkdir(parents=True)
    write_meta(directory, Meta(name, "/v1/realtime", "audio", created_at, worker="w:1"))
    event = {"seq": 0, "ts": created_at, "dir": "up", "frame": {"audio": "@blob/000000.f32"}}
    (directory / "stream.jsonl").write_bytes(orjson.dumps(event, option=orjson.OPT_APPEND_NEWLINE))
    (directory / "blob" / "000000.f32").write_bytes(bytes(600_000))
    (directory / "user.wav").write_bytes(b"RIFF")
    return directory


def test_sessions_are_listed_newest_first(tmp_path: Path) -> None:
    put(tmp_path, "sess_0", 1000.0)
    put(tmp_path, "sess_1", 2000.0)
    answer = session_list(tmp_path, limit=1)
    assert answer["total"] == 2
    assert isinstance(answer["sessions"], list)
    (newest,) = answer["sessions"]
    keys = ("session_id", "worker_id", "last_active", "ticket_id", "messages_hash")
    assert [newest[key] for key in keys] == ["sess_1", "w:1", 2000.0, None, None]


def test_no_directory_is_no_sessions(tmp_path: Path) -> None:
    assert session_list(tmp_path / "nowhere") == {"total": 0, "sessions": []}


def test_meta_and_events_are_told(tmp_path: Path) -> None:
    put(tmp_path, "sess_0")
    meta = session_meta(tmp_path, "sess_0")
    assert meta
    assert (meta["session_id"], meta["mode"], meta["created_at"]) == ("sess_0", "audio", 1000.0)
    pieces = session_recording(tmp_path, "sess_0")
    assert pieces
    answer = orjson.loads(b"".join(pieces))
    assert set(answer) == {"session_id", "meta", "events"}
    assert answer["meta"] == meta
    assert isinstance(answer["events"], list)
    assert answer["events"][0]["frame"] == {"audio": "@blob/000000.f32"}


def test_a_long_timeline_is_told_in_pieces(tmp_path: Path) -> None:
    directory = put(tmp_path, "sess_0")
    lines = [orjson.dumps({"seq": seq, "frame": {"text": "x" * 1000}}) for seq in range(2000)]
    (directory / "stream.jsonl").write_bytes(b"\n".join([*lines, b'{"seq":2000,"fra']))
    told = session_recording(tmp_path, "sess_0")
    assert told
    pieces = list(told)
    assert max(map(len, pieces)) < 512 * 1024
    events = orjson.loads(b"".join(pieces))["events"]
    assert [event["seq"] for event in events] == list(range(2000))


def test_a_timeline_without_events_is_told(tmp_path: Path) -> None:
    directory = put(tmp_path, "sess_0")
    (directory / "stream.jsonl").write_bytes(b"")
    pieces = session_recording(tmp_path, "sess_0")
    assert pieces
    assert orjson.loads(b"".join(pieces))["events"] == []
    (directory / "stream.jsonl").unlink()
    assert session_recording(tmp_path, "sess_0") is None


@pytest.mark.parametrize(
    ("path", "content_type"),
    [
        ("meta.json", "application/json"),
        ("stream.jsonl", "application/x-ndjson"),
        ("user.wav", "audio/wav"),
        ("blob/000000.f32", "application/octet-stream"),
        ("@blob/000000.f32", "application/octet-stream"),
    ],
)
def test_files_are_found(tmp_path: Path, path: str, content_type: str) -> None:
    directory = put(tmp_path, "sess_0")
    asset = session_asset(tmp_path, "sess_0", path)
    assert asset
    assert asset.path == directory / path.removeprefix("@")
    assert asset.content_type == content_type


ELSEWHERE = [
    *("../sess_1/meta.json", "blob/../../sess_1/meta.json", "..", ".", "", "blob", "blob/"),
    *("/etc/hostname", "blob//000000.f32", "./meta.json", "meta.json\0", "meta.json\n"),
    *("..\\sess_1\\meta.json", "%2e%2e/secret.json", "secret.json", "link.json", "away/meta.json"),
    "meta.json.part",
]


@pytest.mark.parametrize("path", ELSEWHERE)
def test_nothing_else_is_found(tmp_path: Path, path: str) -> None:
    directory = put(tmp_path, "sess_0")
    put(tmp_path, "sess_1")
    (tmp_path / "secret.json").write_text("{}")
    (directory / "link.json").symlink_to(tmp_path / "secret.json")
    (directory / "meta.json.part").touch()
    assert session_asset(tmp_path, "sess_0", path) is None


@pytest.mark.parametrize(
    "name", ["..", ".", "", "/", "sess_0/../sess_0", "sess_0\n", "link", "nobody", "x" * 500]
)
def test_only_recordings_are_found(tmp_path: Path, name: str) -> None:
    put(tmp_path, "sess_0")
    (tmp_path / "link").symlink_to(tmp_path / "sess_0")
    assert session_meta(tmp_path, name) is None
    assert session_recording(tmp_path, name) is None
    assert session_asset(tmp_path, name, "meta.json") is None
    assert session_archive(tmp_path, name) is None


def test_a_recording_is_downloaded_in_pieces(tmp_path: Path) -> None:
    directory = put(tmp_path, "sess_0")
    (directory / "link.json").symlink_to("/etc/hostname")
    archive = session_archive(tmp_path, "sess_0")
    assert archive
    pieces = list(archive)
    assert len(pieces) > 1
    with zipfile.ZipFile(io.BytesIO(b"".join(pieces))) as file:
        assert file.testzip() is None
        assert sorted(file.namelist()) == [
            "sess_0/blob/000000.f32",
            "sess_0/meta.json",
            "sess_0/stream.jsonl",
            "sess_0/user.wav",
        ]
        assert file.read("sess_0/blob/000000.f32") == bytes(600_000)
