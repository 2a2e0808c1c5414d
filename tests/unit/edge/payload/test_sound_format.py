"""Formats of raw sound: their codes, compared with libsndfile, and what clients of L may send."""

from __future__ import annotations

import io

import numpy as np
import pytest
import soundfile

from duplane.edge.client_errors import ClientError
from duplane.edge.dialects.openai_sound import decode_append
from duplane.edge.payload.fields import Fields
from duplane.edge.payload.sound_format import Encoding, SoundFormat

LEVELS = np.arange(-32_768, 32_768).astype("<i2")
INT16 = SoundFormat(Encoding.INT16, 24_000)
CODES = {"ULAW": SoundFormat(Encoding.ULAW, 8_000), "ALAW": SoundFormat(Encoding.ALAW, 8_000)}


def as_pcm(levels: np.ndarray) -> bytes:
    return (levels.astype(np.float32) / 32_768).tobytes()


def levels_of(pcm: bytes) -> np.ndarray:
    return (np.frombuffer(pcm, "<f4") * 32_768).astype(int)


@pytest.mark.parametrize("law", CODES)
def test_every_code_of_g711_means_what_libsndfile_says(law: str) -> None:
    codes = bytes(range(256))
    raw = {"format": "RAW", "subtype": law, "samplerate": 8_000, "channels": 1}
    expected, _ = soundfile.read(io.BytesIO(codes), dtype="int16", **raw)
    assert levels_of(CODES[law].decode(codes)).tolist() == expected.tolist()


@pytest.mark.parametrize("law", CODES)
def test_no_code_of_libsndfile_is_nearer_to_a_sample(law: str) -> None:
    file = io.BytesIO()
    soundfile.write(file, LEVELS, 8_000, format="RAW", subtype=law)
    code = CODES[law]
    ours, theirs = code.encode(as_pcm(LEVELS)), file.getvalue()
    errors = [np.abs(levels_of(code.decode(each)) - LEVELS) for each in (ours, theirs)]
    assert np.all(errors[0] <= errors[1])
    differing = np.count_nonzero(np.frombuffer(ours, "u1") != np.frombuffer(theirs, "u1"))
    assert differing < 200  # samples exactly between two codes


def test_int16_samples_come_back_unchanged() -> None:
    assert INT16.encode(INT16.decode(LEVELS.tobytes())) == LEVELS.tobytes()


@pytest.mark.parametrize("code", [INT16, *CODES.values()], ids=lambda code: code.encoding)
def test_samples_outside_of_full_scale_are_clipped(code: SoundFormat) -> None:
    loud = np.array([9.0, -9.0], "<f4").tobytes()
    whole = np.array([1.0, -1.0], "<f4").tobytes()
    assert code.encode(loud) == code.encode(whole)
    assert np.sign(levels_of(code.decode(code.encode(loud)))).tolist() == [1, -1]


def test_a_sample_may_begin_in_one_append_and_end_in_the_next() -> None:
    sound = LEVELS[::100].tobytes()
    pcm, begun = b"", b""
    for start in range(0, len(sound), 33):
        event = Fields({"audio": sound[start : start + 33]})
        piece, begun = decode_append(event, INT16, begun, 30.0)
        pcm += piece
    assert pcm == INT16.decode(sound)
    assert begun == b""


def test_an_append_without_a_whole_sample_is_kept_and_an_empty_one_is_refused() -> None:
    assert decode_append(Fields({"audio": b"\1"}), INT16, b"", 30.0) == (b"", b"\1")
    with pytest.raises(ClientError, match="audio: is empty"):
        decode_append(Fields({"audio": b""}), INT16, b"", 30.0)


def test_too_long_an_append_is_refused() -> None:
    with pytest.raises(ClientError, match=r"audio: lasts 1.5 s, more than 1 s"):
        decode_append(Fields({"audio": bytes(72_000)}), INT16, b"", 1.0)
