"""The tools of the reference can play recordings and send them again.

These tests read a recording as those tools do. They play the WAV file that an event names. To send
a session again, they take the settings from the event `session.init`, and audio and pictures from
the field `payload_trace`.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pybase64
import soundfile
from support.edge.recorded_session import RecordedSession
from support.protocols.transcripts import pcm, wav

from duplane.edge.recording.settings import RecordingSettings
from duplane.edge.recording.storage import read_events

JPEG = b"\xff\xd8\xff" + bytes(61)


def encoded(content: bytes) -> str:
    return pybase64.b64encode(content).decode()


def recorded(root: Path, up: object, down: object, mode: str = "audio") -> tuple[Path, list[Any]]:
    session = RecordedSession(RecordingSettings(root), mode=mode)
    session.up(orjson.dumps(up))
    session.down(orjson.dumps(down))
    session.end()
    return session.directory, list(read_events(session.directory))


APPEND = {
    "type": "input.append",
    "input": {"audio": encoded(pcm(16_000)), "video_frames": [encoded(JPEG)], "input_id": "u"},
}
SPEECH = {"type": "response.output.delta", "kind": "audio", "audio": encoded(pcm(24_000))}


def test_sound_of_each_event_is_a_wav_file(tmp_path: Path) -> None:
    directory, (up, down) = recorded(tmp_path, APPEND, SPEECH)
    for name, rate in ((up["frame"]["input"]["audio"], 16_000), (down["frame"]["audio"], 24_000)):
        samples, found_rate = soundfile.read(directory / name.removeprefix("@"), dtype="float32")
        assert soundfile.info(directory / name.removeprefix("@")).subtype == "PCM_16"
        assert found_rate == rate
        expected = np.frombuffer(pcm(rate), "<f4")
        assert np.abs(samples - expected).max() < 1e-4


def test_units_can_be_read_exactly(tmp_path: Path) -> None:
    directory, (up, down) = recorded(tmp_path, APPEND, SPEECH)
    for event, count, rate in ((up, 16_000, 16_000), (down, 24_000, 24_000)):
        trace = event["payload_trace"]["audio"]
        raw = (directory / trace["blob_f32"].removeprefix("@")).read_bytes()
        assert raw == pcm(count)
        assert trace["sha256"] == hashlib.sha256(raw).hexdigest()
        assert (trace["nbytes"], trace["samples"]) == (len(raw), count)
        assert (trace["sample_rate"], trace["dtype"]) == (rate, "float32-le")
    assert up["payload_trace"]["audio"]["blob_wav"] == up["frame"]["input"]["audio"]
    (picture,) = up["payload_trace"]["video_frames"]
    assert (directory / picture["blob_jpg"].removeprefix("@")).read_bytes() == JPEG
    assert picture["sha256"] == hashlib.sha256(JPEG).hexdigest()


def test_voices_stay_in_the_settings_of_dialect_b(tmp_path: Path) -> None:
    init = {"type": "session.init", "payload": {"ref_audio_base64": encoded(pcm(16_000))}}
    _, (up, down) = recorded(tmp_path, init, {"type": "session.created"})
    assert up["frame"] == init
    assert "payload_trace" not in up
    assert "payload_trace" not in down


def test_wav_file_of_the_client_is_kept_as_it_is(tmp_path: Path) -> None:
    sent = wav(16_000)  # once, because a file of float samples has the time at which it was made
    append = {"type": "input_audio_buffer.append", "audio": encoded(sent)}
    directory, (up, _) = recorded(tmp_path, append, SPEECH)
    assert (directory / up["frame"]["audio"].removeprefix("@")).read_bytes() == sent
    assert "payload_trace" not in up
