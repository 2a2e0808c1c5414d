"""The WAV parser for clients' files: it reads what soundfile reads, and believes no header."""

from __future__ import annotations

import io
import struct
import tracemalloc
from contextlib import suppress

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from duplane.fabric.wav import WavError, open_wav

SUBTYPES = ["PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE"]


def written(samples: np.ndarray, subtype: str, kind: str = "WAV", rate: int = 16_000) -> bytes:
    stream = io.BytesIO()
    soundfile.write(stream, samples, rate, format=kind, subtype=subtype)
    return stream.getvalue()


def chunk(name: bytes, content: bytes) -> bytes:
    return name + struct.pack("<I", len(content)) + content + b"\0" * (len(content) % 2)


def riff(*chunks: bytes) -> bytes:
    return b"RIFF" + struct.pack("<I", 4 + len(b"".join(chunks))) + b"WAVE" + b"".join(chunks)


def form(kind: int = 1, channels: int = 1, rate: int = 16_000, bits: int = 16) -> bytes:
    frame_bytes = channels * bits // 8
    content = struct.pack("<HHIIHH", kind, channels, rate, rate * frame_bytes, frame_bytes, bits)
    return chunk(b"fmt ", content)


@given(
    st.sampled_from(SUBTYPES),
    st.sampled_from(["WAV", "WAVEX"]),
    st.integers(1, 2),
    st.sampled_from([8_000, 11_025, 44_100, 48_000]),
    st.lists(st.floats(-1, 1, width=32), max_size=40),
)
def test_what_soundfile_writes_is_read_as_soundfile_reads_it(
    subtype: str, kind: str, channels: int, rate: int, values: list[float]
) -> None:
    samples = np.repeat(np.array(values, np.float32)[:, None], channels, axis=1)
    samples[::2] *= -0.5
    file = written(samples, subtype, kind, rate)
    sound = open_wav(file)
    expected, _ = soundfile.read(io.BytesIO(file), dtype="float32", always_2d=True)
    assert (sound.rate_hertz, sound.channels, sound.frames) == (rate, channels, len(values))
    assert np.array_equal(sound.samples(), expected)


def test_every_integer_is_read_as_soundfile_reads_it() -> None:
    integers = np.concatenate([np.arange(-300, 300), [-(2**31), 2**31 - 1, 2**24 + 1]])
    for subtype in ("PCM_16", "PCM_24", "PCM_32"):
        file = written(integers.astype(np.int32), subtype)
        expected, _ = soundfile.read(io.BytesIO(file), dtype="float32", always_2d=True)
        assert np.array_equal(open_wav(file).samples(), expected)


def test_chunks_before_the_data_are_passed_over() -> None:
    data = chunk(b"data", b"\1\0\2\0")
    file = riff(chunk(b"LIST", b"odd"), form(), chunk(b"fact", bytes(4)), data, chunk(b"x", b"y"))
    assert open_wav(file).samples().ravel().tolist() == [1 / 32768, 2 / 32768]


@pytest.mark.parametrize("size", [0, 6, 0x7FFFFFFF, 0xFFFFFFFF])
def test_data_of_an_unknown_size_ends_with_the_file(size: int) -> None:
    file = riff(form()) + b"data" + struct.pack("<I", size) + b"\1\0\2\0\3"
    assert open_wav(file).frames == 2  # half a sample is left out


@pytest.mark.parametrize(
    ("file", "fault"),
    [
        (b"", "not a readable WAV file"),
        (b"RIFF\0\0\0\0WAVE", "not a readable WAV file"),
        (b"RIFX" + riff(form(), chunk(b"data", bytes(4)))[4:], "not a readable WAV file"),
        (b"RF64" + riff(form(), chunk(b"data", bytes(4)))[4:], "not a readable WAV file"),
        (riff(form()), "not a readable WAV file"),
        (riff(chunk(b"data", bytes(4)), form()), "not a readable WAV file"),
        (riff(chunk(b"fmt ", bytes(15)), chunk(b"data", bytes(4))), "not a readable WAV file"),
        (riff(form(channels=0), chunk(b"data", bytes(4))), "not a readable WAV file"),
        (riff(b"junk\xff\xff\xff\xff", form(), chunk(b"data", b"")), "not a readable WAV file"),
        (riff(*[chunk(b"junk", b"")] * 100, form(), chunk(b"data", b"")), "not a readable WAV"),
        (riff(form(kind=7, bits=8), chunk(b"data", bytes(4))), "format 7 with 8 bits, must be PCM"),
        (riff(form(bits=12), chunk(b"data", bytes(4))), "format 1 with 12 bits"),
        (riff(form(kind=3, bits=16), chunk(b"data", bytes(4))), "format 3 with 16 bits"),
        (riff(form(kind=0xFFFE), chunk(b"data", bytes(4))), "format 65534"),
    ],
)
def test_other_files_are_refused(file: bytes, fault: str) -> None:
    with pytest.raises(WavError, match=fault):
        open_wav(file)


def test_a_frame_whose_size_is_wrong_is_refused() -> None:
    content = struct.pack("<HHIIHH", 1, 2, 16_000, 64_000, 2, 16)  # two channels need 4 bytes
    with pytest.raises(WavError, match="not a readable WAV file"):
        open_wav(riff(chunk(b"fmt ", content), chunk(b"data", bytes(8))))


WHOLE = [
    written(np.linspace(-1, 1, 20)[:, None].repeat(2, 1), subtype, kind)
    for subtype in SUBTYPES
    for kind in ("WAV", "WAVEX")
]


@given(
    st.sampled_from(WHOLE),
    st.lists(st.tuples(st.integers(0, 100), st.integers(0, 255)), min_size=1, max_size=12),
    st.integers(0, 200),
)
def test_a_damaged_file_is_read_or_refused_and_nothing_else(
    whole: bytes, changes: list[tuple[int, int]], cut: int
) -> None:
    damaged = bytearray(whole[: len(whole) - cut] if cut < len(whole) else whole)
    for offset, value in changes:
        damaged[offset % len(damaged)] = value
    tracemalloc.start()
    try:
        with suppress(WavError):
            sound = open_wav(bytes(damaged))
            assert sound.samples().shape == (sound.frames, sound.channels)
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()


@given(st.binary(max_size=100))
def test_noise_is_read_or_refused_and_nothing_else(noise: bytes) -> None:
    with suppress(WavError):
        open_wav(b"RIFF\0\0\0\0WAVE" + noise).samples()
