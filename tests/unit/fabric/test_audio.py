"""PCM and sound files: valid audio is decoded, everything else is refused."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from hypothesis import example, given
from hypothesis import strategies as st

from duplane.fabric.audio import (
    MAX_EXPONENT,
    WAV_HEAD,
    AudioError,
    Samples,
    int16_from_pcm,
    packed_from_pcm,
    pcm_from_int16,
    pcm_from_samples,
    read_audio_file,
    read_client_wav,
    samples_from_pcm,
)


def tone(rate: int, seconds: float, channels: int = 1) -> np.ndarray:
    wave = 0.5 * np.sin(2 * np.pi * 440 * np.arange(int(rate * seconds)) / rate)
    return np.tile(wave.astype(np.float32)[:, None], (1, channels))


def test_samples_survive_the_wire() -> None:
    samples = tone(16_000, 0.1)[:, 0]
    assert np.array_equal(samples_from_pcm(pcm_from_samples(samples)), samples)


def test_no_audio_is_audio() -> None:
    assert samples_from_pcm(b"").size == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30])
def test_samples_that_are_no_sound_are_refused(bad: float) -> None:
    samples = np.zeros(16_000, np.float32)
    samples[123] = bad
    with pytest.raises(AudioError, match="finite"):
        samples_from_pcm(samples.tobytes())


@given(st.binary(max_size=64))
def test_any_bytes_are_samples_or_refused(pcm: bytes) -> None:
    try:
        samples = samples_from_pcm(pcm)
    except AudioError:
        return
    assert samples.size * 4 == len(pcm)
    assert np.isfinite(samples).all()


@given(st.lists(st.integers(-32768, 32767), max_size=50))
def test_int16_survives_the_way_through_float32(values: list[int]) -> None:
    int16 = np.array(values, "<i2").tobytes()
    assert int16_from_pcm(pcm_from_int16(int16)) == int16


@given(st.lists(st.floats(-1, 1, width=32), max_size=50))
def test_float32_is_rounded_to_the_nearest_int16(values: list[float]) -> None:
    samples = np.array(values, np.float32)
    int16 = int16_from_pcm(pcm_from_samples(samples))
    assert int16 is not None
    error = samples_from_pcm(pcm_from_int16(int16)) - samples
    # There is no int16 for 1.0.
    assert (np.abs(error) * 32768 <= np.where(samples > 32767 / 32768, 1.0, 0.5)).all()


@given(st.lists(st.integers(-32768, 32767), max_size=50), st.integers(0, 4))
@example(values=[2048], gain_exponent=4)
@example(values=[16384, 16383, -3], gain_exponent=2)
def test_int16_of_a_louder_source_survives(values: list[int], gain_exponent: int) -> None:
    pcm = pcm_from_samples(np.array(values, np.float32) * (2.0**gain_exponent / 32768))
    packed = packed_from_pcm(pcm)
    assert packed is not None
    int16, exponent = packed
    # A peak of a power of two, which is no int16, is one step lower. Every other sample is exact.
    highest = np.float32(2.0**exponent * 32767 / 32768)
    expected = np.frombuffer(pcm, "<f4")
    if np.max(expected, initial=0) == 2.0**exponent:
        expected = np.minimum(expected, highest)
    assert pcm_from_int16(int16, exponent) == pcm_from_samples(expected)


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=50))
def test_samples_of_any_amplitude_are_packed(values: list[float]) -> None:
    samples = np.array(values, np.float32)
    packed = packed_from_pcm(pcm_from_samples(samples))
    assert packed is not None
    int16, exponent = packed
    assert len(int16) == 2 * len(values)
    assert 0 <= exponent <= MAX_EXPONENT
    error = np.abs(samples_from_pcm(pcm_from_int16(int16, exponent)) - samples)
    # There is no int16 for a sample of 2**exponent, or just above it.
    assert error.max() <= 1.5 * 2.0**exponent / 32768
    # The exponent is the smallest one.
    assert exponent == 0 or np.abs(samples).max() > 2.0 ** (exponent - 1)


@pytest.mark.parametrize("value", [1.01e6, -1.01e6, float("nan"), float("inf")])
def test_samples_that_are_not_accepted_are_not_packed(value: float) -> None:
    assert packed_from_pcm(pcm_from_samples(np.array([0.0, value], np.float32))) is None


def test_full_scale_is_the_nearest_int16() -> None:
    int16 = int16_from_pcm(pcm_from_samples(np.array([1.0, -1.0], np.float32)))
    assert int16 == np.array([32767, -32768], "<i2").tobytes()


@pytest.mark.parametrize("value", [1.001, -1.001, 1e5, float("nan"), float("inf")])
def test_samples_beyond_full_scale_have_no_int16(value: float) -> None:
    assert int16_from_pcm(pcm_from_samples(np.array([0.0, value], np.float32))) is None


@pytest.mark.parametrize("rate", [8_000, 16_000, 44_100])
@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("subtype", ["PCM_16", "FLOAT", "PCM_24"])
def test_any_wav_becomes_16_khz_mono(
    tmp_path: Path, rate: int, channels: int, subtype: str
) -> None:
    file = tmp_path / "sound.wav"
    soundfile.write(file, tone(rate, 1.0, channels), rate, subtype=subtype)
    samples = read_audio_file(file)
    assert abs(samples.size - 16_000) <= 2
    assert 0.3 < float(np.sqrt(np.mean(samples**2))) < 0.4
    assert WAV_HEAD.match(file.read_bytes())
    assert np.array_equal(read_client_wav(file.read_bytes()), samples)


@pytest.mark.parametrize("subtype", ["GSM610", "G721_32", "IMA_ADPCM", "MS_ADPCM", "ULAW"])
def test_wav_of_any_codec_is_read_from_operators_and_refused_from_clients(
    tmp_path: Path, subtype: str
) -> None:
    file = tmp_path / "sound.wav"
    soundfile.write(file, tone(8_000, 1.0), 8_000, subtype=subtype)
    assert abs(read_audio_file(file).size - 16_000) < 1_000
    with pytest.raises(AudioError, match="must be PCM of"):
        read_client_wav(file.read_bytes())


@pytest.mark.parametrize(
    ("rate", "channels"), [(2_000_000_000, 1), (96_000, 1), (100, 1), (16_000, 3)]
)
def test_wav_that_would_cost_too_much_is_refused(rate: int, channels: int) -> None:
    stream = io.BytesIO()
    soundfile.write(stream, np.zeros((160, channels), np.float32), rate, format="WAV")
    with pytest.raises(AudioError, match="must have"):
        read_client_wav(stream.getvalue())


@pytest.fixture(params=["operator", "client"])
def read(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Samples]:
    """Return the reader of WAV files of operators, or of clients."""
    if request.param == "client":
        return read_client_wav

    def read_file(content: bytes, **options: Any) -> Samples:
        file = tmp_path / "sound.wav"
        file.write_bytes(content)
        return read_audio_file(file, **options)

    return read_file


@pytest.mark.parametrize("values", [(np.nan, 0), (np.inf, 0), (np.inf, -np.inf), (1e300, 0)])
def test_wav_of_numbers_that_are_no_sound_is_refused(
    read: Callable[..., Samples], values: tuple[float, float]
) -> None:
    stream = io.BytesIO()
    samples = np.tile(np.array(values), (100, 1))
    soundfile.write(stream, samples, 16_000, format="WAV", subtype="DOUBLE")
    with pytest.raises(AudioError, match="finite"):
        read(stream.getvalue())


def test_long_file_is_refused_before_it_is_decoded(read: Callable[..., Samples]) -> None:
    stream = io.BytesIO()
    soundfile.write(stream, tone(16_000, 2.0), 16_000, format="WAV")
    with pytest.raises(AudioError, match="more than 1 s"):
        read(stream.getvalue(), max_s=1.0)


@pytest.mark.parametrize("garbage", [b"", b"RIFF", b"RIFF\0\0\0\0WAVE", b"RIFF" + b"\xff" * 60])
def test_broken_file_is_refused(read: Callable[..., Samples], garbage: bytes) -> None:
    with pytest.raises(AudioError):
        read(garbage)
