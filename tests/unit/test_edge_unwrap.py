"""WAV files that are decoded before a session takes the event."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import pybase64
import pytest
from edge_transcripts import pcm, wav

from duplane.edge.dialects import media
from duplane.edge.dialects.fields import Fields
from duplane.edge.dialects.media import decode_audio
from duplane.edge.dialects.unwrap import is_worth_unwrapping, unwrap
from duplane.edge.settings import Limits
from duplane.fabric.audio import Samples, pcm_from_samples

FILE = pybase64.b64encode(wav(200_000)).decode()
RAW = pybase64.b64encode(pcm(200_000)).decode()


LIMITS = Limits()
SHORT = Limits(voice_s=1.0, append_s=1.0, chat_audio_s=1.0)


def unwrapped(event: dict[str, Any], limits: Limits = LIMITS) -> Any:
    told = unwrap(orjson.dumps(event), limits)
    assert isinstance(told, Fields)
    return told.whole


def test_only_long_messages_with_a_file_are_worth_it() -> None:
    assert is_worth_unwrapping(orjson.dumps({"session": {"ref_audio": FILE}}))
    assert not is_worth_unwrapping(orjson.dumps({"session": {"ref_audio": RAW}}))
    short = pybase64.b64encode(wav(16_000)).decode()
    assert not is_worth_unwrapping(orjson.dumps({"session": {"ref_audio": short}}))


def test_files_become_what_they_would_be_decoded_to() -> None:
    event = {
        "type": "session.init",
        "payload": {"voice": {"ref_audio": FILE, "tts_ref_audio": RAW}, "seed": 3},
        "input": {"messages": [{"role": "user", "content": [{"type": "audio", "data": FILE}]}]},
    }
    told = unwrapped(event)
    voice = told["payload"].pop("voice")
    assert voice["tts_ref_audio"] == RAW
    assert told["payload"] == {"seed": 3}
    (part,) = told["input"]["messages"][0]["content"]
    expected = decode_audio(FILE, "x", 60.0)
    for text in (voice["ref_audio"], part["data"]):
        assert decode_audio(text, "x", 60.0) == expected
        assert not text.startswith("UklGR")


@pytest.mark.parametrize(
    "event",
    [
        {"text": FILE, "content": FILE, "image": FILE},
        {"type": "audio", "data": FILE, "sample_rate": "fast"},
        {"data": FILE, "sample_rate": 48_000},
        {"audio": FILE[:-5] + "%%%%="},
        {"audio": pybase64.b64encode(b"RIFF1234WEBP" + bytes(300_000)).decode()},
        {"audio": pybase64.b64encode(b"RIFF1234WAVE" + bytes(300_000)).decode()},
        {"audio": None, "data": 3, "base64": [FILE, 3, None]},
        {"a": {"a": {"a": {"a": {"a": {"a": {"a": {"a": {"a": {"audio": FILE}}}}}}}}}},
    ],
    ids=["text", "no rate", "no part", "no base64", "no wav", "broken", "types", "deep"],
)
def test_anything_else_stays_as_it_is(event: dict[str, Any]) -> None:
    assert unwrapped(event) == event


def test_what_is_too_long_stays_for_the_session_to_refuse() -> None:
    assert unwrapped({"audio": FILE}, SHORT) == {"audio": FILE}
    assert unwrap(b"{", LIMITS) == b"{"
    assert unwrap(b"[3]", LIMITS) == b"[3]"


def test_silence_of_no_length_stays_for_the_session_to_refuse() -> None:
    empty = pybase64.b64encode(wav(0)).decode()
    assert unwrapped({"audio": empty}) == {"audio": empty}
    assert np.frombuffer(pybase64.b64decode(unwrapped({"audio": FILE})["audio"]), "<f4").size


def test_sounds_of_another_rate_are_brought_to_ours() -> None:
    event = {"type": "audio", "data": RAW, "sample_rate": 48_000}
    assert is_worth_unwrapping(orjson.dumps(event))
    told = unwrapped(event)
    assert told["sample_rate"] == 16_000
    assert len(decode_audio(told["data"], "x", 60.0)) == 4 * round(200_000 / 3)
    file = unwrapped({"type": "audio", "data": FILE, "sample_rate": 48_000})
    assert decode_audio(file["data"], "x", 60.0) == pcm(200_000)


def test_no_more_is_decoded_than_all_media_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []

    def count(samples: Samples) -> bytes:
        decoded.append(samples.size)
        return pcm_from_samples(samples)

    monkeypatch.setattr(media, "pcm_from_samples", count)
    part = {"type": "audio", "data": FILE}
    told = unwrapped({"content": [part] * 5}, Limits(chat_media_bytes=2_000_000, voice_s=0.0))
    assert [item == part for item in told["content"]] == [False, False, True, True, True]
    assert decoded == [200_000] * 2
