"""The events of a recording, the files of their payloads, names of recordings, and consent."""

from __future__ import annotations

import sys
from pathlib import Path

import orjson
import pybase64
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.protocols.transcripts import pcm, wav

from duplane.edge.recording.events import join, split
from duplane.edge.recording.settings import Consent, RecordingSettings
from duplane.edge.recording.storage import (
    safe_name,
)

CRASHING_RECORDER = (sys.executable, "-m", "support.edge.recorded_session")
JPEG = b"\xff\xd8\xff" + bytes(61)


def test_payloads_are_moved_out_and_named_by_what_they_are() -> None:
    encoded = {
        "audio": pybase64.b64encode(pcm(16_000)).decode(),
        "ref_audio": pybase64.b64encode(wav(16_000)).decode(),
        "video_frames": [pybase64.b64encode(JPEG).decode()] * 2,
        "blah": pybase64.b64encode(bytes(50)).decode(),
    }
    event, blobs = split(orjson.dumps(encoded), 7)
    assert event == {
        "audio": "@blob/000007.wav",
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


@settings(max_examples=100)
@given(JSON)
def test_what_is_split_can_be_joined(event: object) -> None:
    parts, blobs = split(orjson.dumps(event), 0)
    contents = {blob.name: blob.content for blob in blobs}
    assert join(parts, contents.__getitem__) == event


def test_picture_in_a_data_uri_becomes_a_file() -> None:
    picture = b"\x89PNG\r\n\x1a\n" + bytes(100)
    head = "data:image/png;base64,"
    event = {"image_url": {"url": head + pybase64.b64encode(picture).decode()}}
    parts, (blob,) = split(orjson.dumps(event), 7)
    assert parts == {"image_url": {"url": f"{head}@blob/000007.png"}}
    assert (blob.content, blob.is_picture) == (picture, True)
    assert join(parts, {blob.name: picture}.__getitem__) == event
    told = {"url": f"{head}@blob/000008.png"}
    assert join(told, {blob.name: picture}.__getitem__) == told


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
    assert settings.is_recorded("/v1/realtime?mode=audio") is silent
    assert settings.is_recorded("/v1/realtime?mode=audio&recording=on") is on
    assert settings.is_recorded("/v1/realtime?recording=off") is off


@pytest.mark.parametrize("consent", Consent)
@pytest.mark.parametrize("query", ["", "?recording=on", "?recording=off"])
def test_a_credential_that_forbids_or_requires_recording_decides(
    consent: Consent, query: str
) -> None:
    settings = RecordingSettings(Path("/nowhere"), consent)
    assert not settings.is_recorded(f"/v1/realtime{query}", may_record=False)
    assert settings.is_recorded(f"/v1/realtime{query}", may_record=True)


@pytest.mark.parametrize(
    ("query", "is_agreed"),
    [
        *((f"recording={wish}", True) for wish in ("on", "ON", "1", "true", "yes")),
        *((f"recording={wish}", False) for wish in ("off", "0", "no", "never", "n", "oN+", "")),
        ("recording=on&recording=off", False),
        ("recording=off&recording=on", False),
        ("recording", False),
    ],
)
def test_only_plain_words_agree_to_be_recorded(query: str, is_agreed: bool) -> None:
    for consent in (Consent.UNLESS_REFUSED, Consent.ON_REQUEST):
        settings = RecordingSettings(Path("/nowhere"), consent)
        assert settings.is_recorded(f"/v1/realtime?mode=audio&{query}") is is_agreed
