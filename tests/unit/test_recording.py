"""Recordings on disk: what is written, what a fault leaves behind, and how long it stays."""

from __future__ import annotations

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
from edge_transcripts import pcm, wav
from hypothesis import given, settings
from hypothesis import strategies as st
from live_edge import HandSetClock
from recording_victim import APPEND, SPEECH

from duplane.edge.recording.events import join, split
from duplane.edge.recording.recorder import Recorder, Recording
from duplane.edge.recording.retention import Kept, expired, recover, sweep
from duplane.edge.recording.settings import Consent, RecordingSettings, recording_settings
from duplane.edge.recording.shelf import (
    is_running,
    lock,
    read_events,
    read_meta,
    recordings,
    safe_name,
    write_meta,
)

VICTIM = Path(__file__).parents[1] / "recording_victim.py"
JPEG = b"\xff\xd8\xff" + bytes(61)


class Session:
    """A recorder, and one session that is recorded by it."""

    def __init__(
        self, settings: RecordingSettings, name: str = "sess_0", mode: str = "audio"
    ) -> None:
        self.clock = HandSetClock()
        self.directory = settings.directory / name
        self.recorder = Recorder(settings, self.clock)
        self.recording: Recording = self.recorder.begin(
            name, f"/v1/realtime?mode={mode}", mode, {"client_id": "c"}, self.clock.now()
        )

    def up(self, frame: bytes, after_s: float = 1.0, heard: bytes = b"") -> None:
        self.clock.advance(after_s)
        heard = pcm(16_000) if frame is APPEND else heard
        self.recording.up(frame, heard, self.clock.now())

    def down(self, frame: bytes, after_s: float = 0.0) -> None:
        self.clock.advance(after_s)
        self.recording.down([frame], self.clock.now())

    def written(self) -> None:
        """Wait until all that was handed over is on disk."""
        done = threading.Event()
        self.recorder.put(done.set, 0)
        assert done.wait(5)

    def end(self) -> None:
        self.recording.end("A", "client", self.clock.now())
        self.recorder.close()


def sound(path: Path) -> tuple[np.ndarray, int]:
    samples, rate = soundfile.read(path, dtype="float32")
    return samples, rate


# --- events ---


def test_payloads_are_moved_out_and_named_by_what_they_are() -> None:
    encoded = {
        "audio": pybase64.b64encode(pcm(16_000)).decode(),
        "ref_audio": pybase64.b64encode(wav(16_000)).decode(),
        "video_frames": [pybase64.b64encode(JPEG).decode()] * 2,
        "blah": pybase64.b64encode(bytes(50)).decode(),
    }
    event, blobs = split(orjson.dumps(encoded), 7)
    assert event == {
        "audio": "@blob/000007.f32",
        "ref_audio": "@blob/000008.wav",
        "video_frames": ["@blob/000009.jpg", "@blob/000010.jpg"],
        "blah": "@blob/000011.bin",
    }
    assert blobs[0].content == pcm(16_000)
    assert [blob.is_audio for blob in blobs] == [True, False, False, False, False]
    contents = {blob.name: blob.content for blob in blobs}
    assert join(event, contents.__getitem__) == encoded


def test_a_reference_to_nothing_is_text() -> None:
    told = orjson.dumps({"text": "@blob/000009.f32", "other": "@../../etc/passwd"})
    event, blobs = split(told, 0)
    assert not blobs
    assert join(event, dict[str, bytes]().__getitem__) == orjson.loads(told)


def test_a_frame_that_is_nested_absurdly_is_a_payload() -> None:
    frame = b'{"audio":"%s","x":%s1%s}' % (pybase64.b64encode(pcm(99)), b"[" * 500, b"]" * 500)
    event, blobs = split(frame, 3)
    assert event == "@blob/000003.bin"
    assert [blob.content for blob in blobs] == [frame]


def test_a_frame_that_is_no_json_is_a_payload() -> None:
    event, blobs = split(b"{nonsense", 0)
    assert event == "@blob/000000.bin"
    assert blobs[0].content == b"{nonsense"


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.text(max_size=90)
    | st.binary(max_size=90).map(lambda raw: pybase64.b64encode(raw).decode()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None)
@given(JSON)
def test_what_is_split_can_be_joined(event: object) -> None:
    parts, blobs = split(orjson.dumps(event), 0)
    contents = {blob.name: blob.content for blob in blobs}
    assert join(parts, contents.__getitem__) == event


def test_names_are_made_safe() -> None:
    assert safe_name("../../etc/passwd") == "______etc_passwd"
    assert safe_name("") == "_"
    assert len(safe_name("x" * 1000)) == 128


@pytest.mark.parametrize(
    ("consent", "silent", "on", "off"),
    [
        (Consent.ALWAYS, True, True, True),
        (Consent.UNLESS_REFUSED, True, True, False),
        (Consent.ON_REQUEST, False, True, False),
    ],
)
def test_the_client_is_asked_as_far_as_the_server_says(
    consent: Consent, silent: bool, on: bool, off: bool
) -> None:
    settings = RecordingSettings(Path("/nowhere"), consent)
    assert settings.is_wanted("/v1/realtime?mode=audio") is silent
    assert settings.is_wanted("/v1/realtime?mode=audio&recording=on") is on
    assert settings.is_wanted("/v1/realtime?recording=off") is off


def test_settings_as_people_give_them() -> None:
    assert recording_settings(None, "always", None, None) is None
    given = recording_settings(Path("/r"), "on_request", 2, 1.5)
    assert given == RecordingSettings(
        Path("/r"), Consent.ON_REQUEST, max_age_s=172_800, max_total_bytes=1_500_000_000
    )
    with pytest.raises(ValueError, match="record-consent"):
        recording_settings(Path("/r"), "maybe", None, None)


# --- on disk ---


def test_both_directions_lie_on_one_time_line(tmp_path: Path) -> None:
    session = Session(RecordingSettings(tmp_path))
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
    session = Session(RecordingSettings(tmp_path))
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
    session = Session(RecordingSettings(tmp_path, replay_bytes=10 * 96_000))
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
    session = Session(RecordingSettings(tmp_path))
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
    session = Session(RecordingSettings(tmp_path))
    session.up(APPEND)
    session.end()
    assert not list(session.directory.glob("replay*"))


def test_jitter_makes_no_gaps(tmp_path: Path) -> None:
    session = Session(RecordingSettings(tmp_path))
    for after_s in (1.0, 1.1, 0.9, 1.2, 0.8, 0.1):
        session.up(APPEND, after_s)
    session.end()
    user, _ = sound(session.directory / "user.wav")
    assert user.size == 6 * 16_000


def test_meta_tells_who_when_and_why(tmp_path: Path) -> None:
    session = Session(RecordingSettings(tmp_path))
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
    session = Session(RecordingSettings(tmp_path))
    whole = SPEECH.replace(b"response.output_audio.delta", b"response.done")
    session.up(APPEND)
    session.down(SPEECH)
    session.down(whole)
    session.up(APPEND)
    session.down(whole)
    session.end()
    model, _ = sound(session.directory / "model.wav")
    assert model.size == 3 * 24_000  # silence, the delta, the reply that came whole


def test_a_chat_lies_turn_by_turn_on_one_time_line(tmp_path: Path) -> None:
    session = Session(RecordingSettings(tmp_path), mode="chat")
    session.up(b"{}", after_s=1.0, heard=pcm(32_000))  # second 1 to 3
    session.down(SPEECH, after_s=0.5)  # second 3 to 4: after the question
    session.down(SPEECH)  # second 4 to 5
    session.up(b"{}", after_s=1.0, heard=pcm(24_000))  # second 5 to 6.5: after the answer
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
    session = Session(RecordingSettings(tmp_path))
    sounds = {name: pybase64.b64encode(wav(16_000)).decode() for name in ("audio", "audio_base64")}
    session.up(orjson.dumps({"type": kind, **sounds, "input": sounds}), heard=pcm(1600))
    session.up(orjson.dumps({"type": kind, **sounds, "input": sounds}))  # refused, say
    session.end()
    user, _ = sound(session.directory / "user.wav")
    assert user.size == 16_000  # silence, then what was heard


def test_video_files_are_named_by_what_they_are() -> None:
    contents = [b"\0\0\0\x18ftypmp42" + bytes(60), b"\x1aE\xdf\xa3" + bytes(60)]
    contents.append(b"RIFF\0\0\0\0WEBP" + bytes(60))
    encoded = [{"data": pybase64.b64encode(content).decode()} for content in contents]
    _, blobs = split(orjson.dumps(encoded), 0)
    assert [blob.name[-4:] for blob in blobs] == [".mp4", "webm", "webp"]
    assert not any(blob.is_audio for blob in blobs)


def test_only_the_owner_may_read(tmp_path: Path) -> None:
    session = Session(RecordingSettings(tmp_path))
    session.end()
    assert session.directory.stat().st_mode & 0o777 == 0o700


# --- faults ---


def test_a_full_queue_costs_events_and_never_waits(tmp_path: Path) -> None:
    session = Session(RecordingSettings(tmp_path, queue_bytes=3 * (len(APPEND) + 64_000)))
    disk = threading.Event()
    session.recorder.put(disk.wait, 0)  # the disk hangs
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
    session = Session(RecordingSettings(tmp_path / "file" / "below"))
    session.up(APPEND)
    session.end()
    assert not recordings(tmp_path / "file" / "below")


def test_a_disk_that_fails_midway_leaves_what_was_written(tmp_path: Path) -> None:
    session = Session(RecordingSettings(tmp_path))
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


def test_a_recording_ends_at_its_bound(tmp_path: Path) -> None:
    session = Session(RecordingSettings(tmp_path, session_bytes=200_000))
    for _ in range(4):
        session.up(APPEND)
    session.end()
    meta = read_meta(session.directory)
    assert meta
    assert meta.is_incomplete
    assert len(list(read_events(session.directory))) == 2


def test_a_second_recording_of_one_name_leaves_the_first_alone(tmp_path: Path) -> None:
    first = Session(RecordingSettings(tmp_path))
    first.up(APPEND)
    first.written()
    second = Session(RecordingSettings(tmp_path))
    second.up(SPEECH)
    second.end()
    first.end()
    events = list(read_events(first.directory))
    assert [event["frame"]["type"] for event in events] == ["input_audio_buffer.append"]
    meta = read_meta(first.directory)
    assert meta
    assert not meta.is_incomplete


def test_a_killed_process_leaves_readable_files(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, VICTIM, tmp_path], stdout=subprocess.PIPE) as victim:
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
    session = Session(RecordingSettings(tmp_path))
    session.up(APPEND)
    session.up(APPEND)
    session.end()
    stream = session.directory / "stream.jsonl"
    stream.write_bytes(stream.read_bytes()[:-20])
    assert len(list(read_events(session.directory))) == 1


# --- retention ---


def kept(name: str, begun_s: float, size: int = 10, is_running: bool = False) -> Kept:
    return Kept(Path(name), begun_s, size, is_running)


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
        session = Session(RecordingSettings(tmp_path), name)
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
    session = Session(RecordingSettings(tmp_path))
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


def test_sweeps_come_at_the_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swept: list[float] = []
    monkeypatch.setattr(
        "duplane.edge.recording.recorder.sweep", lambda _, now_s: swept.append(now_s)
    )
    settings = replace(RecordingSettings(tmp_path), sweep_interval_s=100.0)
    session = Session(settings)
    start = session.clock.now().wall_s
    for _ in range(3):
        session.clock.advance(60)
    session.end()
    session.clock.advance(1000)
    assert [round(at - start) for at in swept] == [0, 120]
