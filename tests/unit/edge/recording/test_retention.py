"""Recordings are deleted by age and total size."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
from support.edge.live_edge import HandSetClock
from support.edge.recorded_session import APPEND, RecordedSession
from support.protocols.transcripts import pcm
from support.time_limits import WITHIN_S

from duplane.edge.recording.recorder import Recorder
from duplane.edge.recording.retention import (
    StoredRecording,
    expired,
    sweep,
    total_bytes,
)
from duplane.edge.recording.settings import RecordingSettings
from duplane.edge.recording.storage import (
    read_meta,
    write_meta,
)

CRASHING_RECORDER = (sys.executable, "-m", "support.edge.recorded_session")
JPEG = b"\xff\xd8\xff" + bytes(61)


def kept(name: str, begun_s: float, size: int = 10, is_running: bool = False) -> StoredRecording:
    return StoredRecording(Path(name), begun_s, size, is_running)


def test_the_old_go() -> None:
    all_kept = [kept("b", 90), kept("a", 10), kept("c", 5, is_running=True)]
    assert [gone.directory.name for gone in expired(all_kept, 100, 50, None)] == ["a"]


def test_the_oldest_go_until_the_rest_fits() -> None:
    all_kept = [kept("c", 3), kept("a", 1, is_running=True), kept("b", 2), kept("d", 4)]
    assert [gone.directory.name for gone in expired(all_kept, 100, None, 25)] == ["b", "c"]
    assert not expired(all_kept, 100, None, 40)


def test_sweep_deletes_by_age_and_touches_nothing_else(tmp_path: Path) -> None:
    settings = RecordingSettings(tmp_path, max_age_s=3600)
    for name in ("sess_0", "sess_1"):
        session = RecordedSession(RecordingSettings(tmp_path), name)
        session.up(APPEND)
        session.end()
    (tmp_path / "not-ours").mkdir()
    (tmp_path / "notes.txt").touch()
    meta = read_meta(tmp_path / "sess_0")
    assert meta
    now_s = meta.created_at + 4000
    meta.created_at = now_s - 10
    write_meta(tmp_path / "sess_0", meta)
    assert sweep(settings, now_s) == ["sess_1"]
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["not-ours", "notes.txt", "sess_0"]


def test_a_running_recording_outlives_every_bound(tmp_path: Path) -> None:
    session = RecordedSession(RecordingSettings(tmp_path))
    session.up(APPEND)
    session.written()
    strict = RecordingSettings(tmp_path, max_age_s=1, max_total_bytes=1)
    assert not sweep(strict, session.clock.now().wall_s + 1e6)
    session.end()
    assert sweep(strict, session.clock.now().wall_s + 1e6) == ["sess_0"]


def test_what_is_half_deleted_is_deleted(tmp_path: Path) -> None:
    (tmp_path / ".deleted-sess_0" / "blob").mkdir(parents=True)
    sweep(RecordingSettings(tmp_path), 0.0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("session_count", [1, 6])
def test_recordings_never_hold_more_than_their_total(
    tmp_path: Path, session_count: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Each session records four megabytes and a mix, although the limit is three megabytes."""
    settings = RecordingSettings(tmp_path, max_total_bytes=3_000_000)
    clock = HandSetClock()
    recorder = Recorder(settings, clock)
    sizes: list[int] = []

    def finish_jobs() -> None:
        for _ in range(2):
            for executor in (recorder._writing, recorder._upkeep):  # pyright: ignore[reportPrivateUsage] - waits for its threads
                done = threading.Event()
                executor.submit(done.set)
                assert done.wait(WITHIN_S)
        sizes.append(total_bytes(tmp_path))

    finish_jobs()
    for number in range(session_count):
        recording = recorder.begin(f"sess_{number}", "/", "audio", {}, clock.now())
        for _ in range(40):
            clock.advance(1.0)
            recording.up(APPEND, pcm(16_000), clock.now())
            finish_jobs()
        recording.end("A", "client", clock.now())
        finish_jobs()
    recorder.close()
    assert 1_500_000 < max(sizes) <= 3_000_000
    assert not caplog.records
