"""Erasing one recording, and all recordings of one person."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from support.edge.recorded_session import APPEND, SPEECH, RecordedSession

from duplane.edge.recording.erasure import AmbiguousSubjectError, erase_recording, erase_subject
from duplane.edge.recording.settings import RecordingSettings
from duplane.edge.recording.storage import STREAM, Meta, recordings, write_meta


def stored(root: Path, name: str, **identity: str) -> None:
    directory = root / name
    directory.mkdir()
    (directory / STREAM).touch()
    write_meta(directory, Meta(name, "/v1/realtime", "audio", 0.0, identity=identity))


def names(root: Path) -> set[str]:
    return {directory.name for directory in recordings(root)}


def test_one_recording_is_deleted_and_no_other(tmp_path: Path) -> None:
    stored(tmp_path, "sess_1")
    stored(tmp_path, "sess_2")
    assert erase_recording(tmp_path, "sess_1")
    assert not erase_recording(tmp_path, "sess_1")
    assert not erase_recording(tmp_path, "../sess_2")
    assert names(tmp_path) == {"sess_2"}
    assert [path.name for path in tmp_path.iterdir()] == ["sess_2"]


def test_all_recordings_of_one_person_are_deleted(tmp_path: Path) -> None:
    stored(tmp_path, "sess_1", tenant="bakery", subject="u1")
    stored(tmp_path, "sess_2", tenant="bakery", subject="u2", client_id="u1")
    stored(tmp_path, "sess_3", tenant="bakery", subject="u1")
    stored(tmp_path, "sess_4")
    assert set(erase_subject(tmp_path, "u1", None)) == {"sess_1", "sess_3"}
    assert names(tmp_path) == {"sess_2", "sess_4"}
    assert not erase_subject(tmp_path, "u1", None)


def test_users_of_two_tenants_with_one_id_are_told_apart(tmp_path: Path) -> None:
    stored(tmp_path, "sess_1", tenant="bakery", subject="u1")
    stored(tmp_path, "sess_2", tenant="library", subject="u1")
    stored(tmp_path, "sess_3", subject="u1")
    with pytest.raises(AmbiguousSubjectError):
        erase_subject(tmp_path, "u1", None)
    assert len(names(tmp_path)) == 3
    assert erase_subject(tmp_path, "u1", "") == ["sess_3"]
    assert erase_subject(tmp_path, "u1", "library") == ["sess_2"]
    assert erase_subject(tmp_path, "u1", None) == ["sess_1"]


def test_nothing_of_a_running_recording_is_left_or_written_again(tmp_path: Path) -> None:
    session = RecordedSession(RecordingSettings(tmp_path))
    session.up(APPEND)
    session.down(SPEECH)
    session.written()
    assert erase_recording(tmp_path, session.directory.name)
    session.up(APPEND)
    session.down(b'{"type":"said later"}')
    session.end()
    assert not list(tmp_path.iterdir())


def test_recording_is_deleted_while_a_recorder_deletes_left_overs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(tmp_path, "sess_1")
    unlink = os.unlink

    def unlink_what_is_deleted_already(path: str, *, dir_fd: int | None = None) -> None:
        monkeypatch.setattr(os, "unlink", unlink)
        unlink(path, dir_fd=dir_fd)
        unlink(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", unlink_what_is_deleted_already)
    assert erase_recording(tmp_path, "sess_1")
    assert not list(tmp_path.iterdir())


def test_only_this_user_can_read_the_files_of_a_recording(tmp_path: Path) -> None:
    session = RecordedSession(RecordingSettings(tmp_path))
    session.up(APPEND)
    session.down(SPEECH)
    session.end()
    files = [path for path in session.directory.rglob("*") if path.is_file()]
    assert {"meta.json", "stream.jsonl", "user.wav", "model.wav", "replay.wav"} < {
        path.name for path in files
    }
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
