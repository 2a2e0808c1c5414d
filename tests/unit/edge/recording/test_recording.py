"""Recordings on disk: files, times, and faults of the disk."""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import orjson
import pybase64
import pytest
import soundfile
from support.edge.recorded_session import APPEND, SPEECH, RecordedSession
from support.paths import TESTS
from support.protocols.transcripts import pcm, wav

from duplane.edge.recording.events import split
from duplane.edge.recording.retention import (
    recover,
)
from duplane.edge.recording.settings import RecordingSettings
from duplane.edge.recording.storage import (
    is_running,
    lock,
    prepare,
    read_events,
    read_meta,
    recordings,
)

CRASHING_RECORDER = (sys.executable, "-m", "support.edge.recorded_session")
JPEG = b"\xff\xd8\xff" + bytes(61)


def sound(path: Path) -> tuple[np.ndarray, int]:
    samples, rate = soundfile.read(path, dtype="float32")
    return samples, rate


# --- on disk ---


def test_both_directions_lie_on_one_time_line(tmp_path: Path) -> None:
    session = RecordedSession(RecordingSettings(tmp_path))
    session.up(APPEND)  # second 0 to 1
    session.up(APPEND)  # second 1 to 2
    session.down(SPEECH, after_s=0.5)  # second 2.5 to 3.5
    session.up(APPEND, after_s=2.5)  # second 4 to 5
    session.end()
    user, rate = sound(session.directory / "user.wav")
    assert (rate, user.size) == (16_000, 5 * 16_000)
    ramp = np.frombuffer(pcm(16_000), "<f4")
    assert np.abs(user[:16_000] - ramp).max() < 1e-4
    assert not user[32_000:64_000].any()
    assert np.abs(user[64_000:] - ramp).max() < 1e-4
    model, rate = sound(session.directory / "model.wav")
    assert (rate, model.size) == (24_000, 84_000)
    assert not model[:60_000].any()
    assert np.abs(model[60_000:] - np.frombuffer(pcm(24_000), "<f4")).max() < 1e-4


def test_the_replay_has_the_user_left_and_the_model_right(tmp_path: Path) -> None:
    session = RecordedSession(RecordingSettings(tmp_path))
    session.up(APPEND)
    session.down(SPEECH, after_s=0.5)
    session.end()
    replay, rate = sound(session.directory / "replay.wav")
    assert (rate, replay.shape) == (24_000, (60_000, 2))
    ramp = np.frombuffer(pcm(24_000), "<f4")
    assert np.abs(replay[1000:23_000, 0] - ramp[1000:23_000]).max() < 1e-3
    assert not replay[:36_000, 1].any()
    assert np.abs(replay[36_000:, 1] - ramp).max() < 1e-4


@pytest.mark.parametrize(("pause_s", "has_replay"), [(8.9, True), (9.5, False)])
def test_a_replay_is_made_within_its_bound(
    tmp_path: Path, pause_s: float, has_replay: bool
) -> None:
    session = RecordedSession(RecordingSettings(tmp_path, replay_bytes=10 * 96_000))
    session.up(APPEND)
    session.up(APPEND, pause_s)
    session.end()
    replay = session.directory / "replay.wav"
    assert replay.exists() is has_replay
    assert not has_replay or replay.stat().st_size <= 10 * 96_000 + 44
    assert not list(session.directory.glob("*.part"))
    meta = read_meta(session.directory)
    assert meta
    assert not meta.is_incomplete


def test_a_mix_that_died_is_removed_and_made_again(tmp_path: Path) -> None:
    session = RecordedSession(RecordingSettings(tmp_path))
    session.up(APPEND)
    session.end()
    (session.directory / "replay.wav").unlink()
    left, running = (session.directory / f"replay.wav.{pid}.part" for pid in (1, 2))
    left.write_bytes(bytes(1000))
    with running.open("wb") as file:
        lock(file.fileno())
        assert recover(RecordingSettings(tmp_path)) == ["sess_0"]
        assert not left.exists()
        assert running.exists()
    assert (session.directory / "replay.wav").exists()


def test_a_mix_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("duplane.edge.recording.mix._write", fail)
    session = RecordedSession(RecordingSettings(tmp_path))
    session.up(APPEND)
    session.end()
    assert not list(session.directory.glob("replay*"))


def test_jitter_makes_no_gaps(tmp_path: Path) -> None:
    session = RecordedSession(RecordingSettings(tmp_path))
    for after_s in (1.0, 1.1, 0.9, 1.2, 0.8, 0.1):
        session.up(APPEND, after_s)
    session.end()
    user, _ = sound(session.directory / "user.wav")
    assert user.size == 6 * 16_000


def test_meta_tells_who_when_and_why(tmp_path: Path) -> None:
    session = RecordedSession(RecordingSettings(tmp_path))
    session.recording.worker = "10.0.0.1:9"
    session.written()
    running = read_meta(session.directory)
    assert running
    assert running.ended_at is None
    assert is_running(session.directory)
    session.up(APPEND, 2.0)
    session.end()
    meta = read_meta(session.directory)
    assert meta
    assert (meta.session_id, meta.mode, meta.dialect) == ("sess_0", "audio", "A")
    assert meta.path == "/v1/realtime"
    assert (meta.duration_s, meta.close_reason, meta.worker) == (2.0, "client", "10.0.0.1:9")
    assert meta.ended_at == meta.created_at + 2.0
    assert meta.identity == {"client_id": "c"}
    assert not meta.is_incomplete
    assert not is_running(session.directory)


def test_what_a_reply_says_twice_is_heard_once(tmp_path: Path) -> None:
    session = RecordedSession(RecordingSettings(tmp_path))
    whole = SPEECH.replace(b"response.output_audio.delta", b"response.done")
    session.up(APPEND)
    session.down(SPEECH)
    session.down(whole)
    session.up(APPEND)
    session.down(whole)
    session.end()
    model, _ = sound(session.directory / "model.wav")
    # One second of silence, one of the delta, and one of the reply without deltas.
    assert model.size == 3 * 24_000


def test_a_chat_lies_turn_by_turn_on_one_time_line(tmp_path: Path) -> None:
    session = RecordedSession(RecordingSettings(tmp_path), mode="chat")
    session.up(b"{}", after_s=1.0, heard=pcm(32_000))  # second 1 to 3
    session.down(SPEECH, after_s=0.5)  # from second 3 to 4, after the question
    session.down(SPEECH)  # second 4 to 5
    session.up(b"{}", after_s=1.0, heard=pcm(24_000))  # from second 5 to 6.5, after the answer
    session.down(SPEECH, after_s=7.5)  # second 10 to 11
    session.end()
    user, _ = sound(session.directory / "user.wav")
    model, _ = sound(session.directory / "model.wav")
    assert (user.size, model.size) == (6.5 * 16_000, 11 * 24_000)
    heard = [bool(user[at * 8_000 : (at + 1) * 8_000].any()) for at in range(13)]
    assert heard == [False] * 2 + [True] * 4 + [False] * 4 + [True] * 3
    said = [bool(model[at * 24_000 : (at + 1) * 24_000].any()) for at in range(11)]
    assert said == [False] * 3 + [True] * 2 + [False] * 5 + [True]


@pytest.mark.parametrize("kind", ["input_audio_buffer.append", "input.append", "audio_chunk"])
def test_only_what_the_session_heard_is_heard(tmp_path: Path, kind: str) -> None:
    session = RecordedSession(RecordingSettings(tmp_path))
    sounds = {name: pybase64.b64encode(wav(16_000)).decode() for name in ("audio", "audio_base64")}
    session.up(orjson.dumps({"type": kind, **sounds, "input": sounds}), heard=pcm(1600))
    session.up(orjson.dumps({"type": kind, **sounds, "input": sounds}))  # refused: no audio
    session.end()
    user, _ = sound(session.directory / "user.wav")
    assert user.size == 16_000  # silence, then the audio of the first event


def test_video_files_are_named_by_what_they_are() -> None:
    contents = [b"\0\0\0\x18ftypmp42" + bytes(60), b"\x1aE\xdf\xa3" + bytes(60)]
    contents.append(b"RIFF\0\0\0\0WEBP" + bytes(60))
    encoded = [{"data": pybase64.b64encode(content).decode()} for content in contents]
    _, blobs = split(orjson.dumps(encoded), 0)
    assert [blob.name[-4:] for blob in blobs] == [".mp4", "webm", "webp"]
    assert not any(blob.is_audio for blob in blobs)


def test_only_the_owner_may_read(tmp_path: Path) -> None:
    session = RecordedSession(RecordingSettings(tmp_path))
    session.end()
    assert session.directory.stat().st_mode & 0o777 == 0o700


# --- faults ---


def test_a_full_queue_costs_events_and_never_waits(tmp_path: Path) -> None:
    session = RecordedSession(RecordingSettings(tmp_path, queue_bytes=3 * (len(APPEND) + 64_000)))
    disk = threading.Event()
    session.recorder.submit(disk.wait, 0)  # the disk hangs
    for _ in range(10):
        session.up(APPEND)
    disk.set()
    session.written()
    session.up(APPEND)  # there is room again
    session.end()
    meta = read_meta(session.directory)
    assert meta
    assert meta.is_incomplete
    assert meta.lost_event_count == 8
    assert len(list(read_events(session.directory))) == 3


def test_a_directory_that_cannot_be_made_costs_the_recording_only(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    session = RecordedSession(RecordingSettings(tmp_path / "file" / "below"))
    session.up(APPEND)
    session.end()
    assert not recordings(tmp_path / "file" / "below")


def test_a_disk_that_fails_midway_leaves_what_was_written(tmp_path: Path) -> None:
    session = RecordedSession(RecordingSettings(tmp_path))
    session.up(APPEND)
    session.written()
    shutil.rmtree(session.directory / "blob")
    session.up(APPEND)
    session.up(APPEND)
    session.end()
    meta = read_meta(session.directory)
    assert meta
    assert meta.is_incomplete
    assert meta.error == "No such file or directory"
    assert meta.close_reason == "client"
    assert len(list(read_events(session.directory))) == 1
    assert sound(session.directory / "replay.wav")[0].shape == (24_000, 2)


def test_disk_that_is_full_leaves_a_recording_that_is_incomplete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk has no room left, not even to write the file of the meta data again."""
    session = RecordedSession(RecordingSettings(tmp_path))
    session.up(APPEND)
    session.written()

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("duplane.edge.recording.writer.write_meta", fail)
    monkeypatch.setattr("duplane.edge.recording.writer.split", fail)
    session.up(APPEND)
    session.up(APPEND)
    session.end()
    meta = read_meta(session.directory)
    assert meta
    assert meta.is_incomplete
    assert session.recorder.stopped_count == 1


def test_directory_that_cannot_be_written_is_refused_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ValueError, match=r"record: .*file/below: Not a directory"):
        prepare(tmp_path / "file" / "below")


def test_a_recording_ends_at_its_bound(tmp_path: Path) -> None:
    session = RecordedSession(RecordingSettings(tmp_path, session_bytes=300_000))
    for _ in range(4):
        session.up(APPEND)
    session.end()
    meta = read_meta(session.directory)
    assert meta
    assert meta.is_incomplete
    assert len(list(read_events(session.directory))) == 2
    assert session.recorder.stopped_count == 0, "the disk has no fault"


def test_a_second_recording_of_one_name_leaves_the_first_alone(tmp_path: Path) -> None:
    first = RecordedSession(RecordingSettings(tmp_path))
    first.up(APPEND)
    first.written()
    second = RecordedSession(RecordingSettings(tmp_path))
    second.up(SPEECH)
    second.end()
    first.end()
    events = list(read_events(first.directory))
    assert [event["frame"]["type"] for event in events] == ["input_audio_buffer.append"]
    meta = read_meta(first.directory)
    assert meta
    assert not meta.is_incomplete


def test_a_killed_process_leaves_readable_files(tmp_path: Path) -> None:
    with subprocess.Popen(
        [*CRASHING_RECORDER, str(tmp_path)], cwd=TESTS, stdout=subprocess.PIPE
    ) as victim:
        try:
            assert victim.stdout
            assert victim.stdout.readline() == b"recorded\n"
            (directory,) = recordings(tmp_path)
            assert is_running(directory)
            assert not recover(RecordingSettings(tmp_path))
        finally:
            victim.kill()
    assert not is_running(directory)
    user, _ = sound(directory / "user.wav")
    model, _ = sound(directory / "model.wav")
    assert user.size >= 3 * 16_000
    assert model.size >= 3 * 24_000
    events = list(read_events(directory))
    assert [event["seq"] for event in events] == list(range(len(events)))
    assert len(events) >= 6
    assert recover(RecordingSettings(tmp_path)) == ["sess_0"]
    meta = read_meta(directory)
    assert meta
    assert (meta.close_reason, meta.is_incomplete) == ("lost", True)
    assert sound(directory / "replay.wav")[0].shape[0] >= 3 * 24_000
    assert not recover(RecordingSettings(tmp_path))


def test_a_last_line_cut_short_is_left_out(tmp_path: Path) -> None:
    session = RecordedSession(RecordingSettings(tmp_path))
    session.up(APPEND)
    session.up(APPEND)
    session.end()
    stream = session.directory / "stream.jsonl"
    stream.write_bytes(stream.read_bytes()[:-20])
    assert len(list(read_events(session.directory))) == 1


def test_sweeps_come_at_the_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swept: list[float] = []
    monkeypatch.setattr(
        "duplane.edge.recording.recorder.sweep",
        lambda _, now_s, *__: swept.append(now_s),
    )
    settings = replace(RecordingSettings(tmp_path), sweep_interval_s=100.0)
    session = RecordedSession(settings)
    start = session.clock.now().wall_s
    for _ in range(3):
        session.clock.advance(60)
    session.end()
    session.clock.advance(1000)
    assert [round(at - start) for at in swept] == [0, 120]
