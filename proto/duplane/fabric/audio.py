"""Converts PCM in the contract's format (mono float32, little endian), and decodes sound files."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import soundfile  # pyright: ignore[reportMissingTypeStubs]  it ships none
import soxr  # pyright: ignore[reportMissingTypeStubs]  it ships none
from numpy.typing import NDArray

from duplane.fabric.wav import WavError, open_wav

# The sample rates of a model whose description has none.
INPUT_RATE_HERTZ = 16_000
OUTPUT_RATE_HERTZ = 24_000
WAV_HEAD = re.compile(rb"RIFF....WAVE", re.DOTALL)
"""The first bytes of a RIFF/WAVE file."""

SAMPLE_BYTES = 4
# The largest accepted sample. Full scale is 1.0, but some clients send integers without scaling
# them. Above this bound, sums in the model could overflow.
_MAX_AMPLITUDE = 1e6

Samples = NDArray[np.float32]


class AudioError(ValueError):
    """Bytes that are not valid audio. The message gives the reason."""


class AudioTooLongError(AudioError):
    """Audio that can be decoded but is too long."""


def too_long(seconds: float, max_s: float) -> AudioTooLongError:
    """Return the error for audio of more than `max_s` seconds."""
    return AudioTooLongError(f"lasts {seconds:g} s, more than {max_s:g} s")


def samples_from_pcm(pcm: bytes) -> Samples:
    """Return float32 bytes as samples, without a copy.

    Raises AudioError for invalid samples, and for a WAV file.
    """
    if WAV_HEAD.match(pcm):
        raise AudioError("is a WAV file, must be bare float32 samples")
    if len(pcm) % SAMPLE_BYTES:
        raise AudioError(f"{len(pcm)} bytes is not a whole number of float32 samples")
    samples = np.frombuffer(pcm, dtype="<f4")
    # If a sample is NaN, both extremes are NaN and the comparisons are false.
    if samples.size and not (
        np.minimum.reduce(samples) >= -_MAX_AMPLITUDE
        and np.maximum.reduce(samples) <= _MAX_AMPLITUDE
    ):
        raise AudioError("samples must be finite")
    return samples


def pcm_from_samples(samples: Samples) -> bytes:
    """Return samples as float32 bytes."""
    return np.ascontiguousarray(samples, dtype="<f4").tobytes()


_INT16_SCALE = np.float32(32768)


MAX_EXPONENT = 20
"""The largest exponent of `packed_from_pcm`: 2 to this power exceeds every accepted sample."""


def int16_from_pcm(pcm: bytes, exponent: int = 0) -> bytes | None:
    """Return float32 bytes, divided by 2 to the power `exponent`, as int16 bytes.

    Returns None if a quotient is outside -1 to 1. The largest quotient, 1.0, becomes the largest
    int16.
    """
    samples = np.frombuffer(pcm, "<f4") * np.ldexp(_INT16_SCALE, -exponent)
    if not samples.size:
        return b""
    np.rint(samples, out=samples)
    high = np.maximum.reduce(samples)
    # The comparisons are false for samples that are not numbers.
    if not (np.minimum.reduce(samples) >= -_INT16_SCALE and high <= _INT16_SCALE):
        return None
    if high == _INT16_SCALE:
        np.minimum(samples, _INT16_SCALE - 1, out=samples)
    return samples.astype("<i2").tobytes()


def packed_from_pcm(pcm: bytes) -> tuple[bytes, int] | None:
    """Return float32 bytes as int16 bytes, and the exponent by which the samples were divided.

    The exponent is 0 unless a sample is outside -1 to 1. Returns None if a sample is not accepted.
    """
    if (int16 := int16_from_pcm(pcm)) is not None:
        return int16, 0
    peak = float(np.maximum.reduce(np.abs(np.frombuffer(pcm, "<f4"))))
    if not peak <= _MAX_AMPLITUDE:
        return None
    exponent = math.ceil(math.log2(peak))
    int16 = int16_from_pcm(pcm, exponent)
    return None if int16 is None else (int16, exponent)


def pcm_from_int16(int16: bytes, exponent: int = 0) -> bytes:
    """Return int16 bytes as float32 bytes, multiplied by 2 to the power `exponent`."""
    scale = np.ldexp(_INT16_SCALE, -exponent)
    return pcm_from_samples(np.frombuffer(int16, "<i2").astype(np.float32) / scale)


# Files of clients have the rates and channels of microphones, so that their seconds bound the cost.
_CLIENT_RATES_HERTZ = range(8_000, 48_001)
_CLIENT_CHANNELS = 2


def read_client_wav(
    file: bytes, *, rate_hertz: int = INPUT_RATE_HERTZ, max_s: float = 3600.0
) -> Samples:
    """Decode a WAV file of a client to mono samples at `rate_hertz`, without any C library.

    The file has PCM or float samples at 8 to 48 kHz in one or two channels. Raises AudioError for
    another file, or if it is longer than `max_s`.
    """
    try:
        sound = open_wav(file)
    except WavError as error:
        raise AudioError(str(error)) from None
    rate = sound.rate_hertz
    if rate not in _CLIENT_RATES_HERTZ:
        raise AudioError(f"has {rate} samples a second, must have 8000 to 48000")
    if sound.channels > _CLIENT_CHANNELS:
        raise AudioError(f"has {sound.channels} channels, must have 1 or 2")
    if sound.frames > max_s * rate:
        raise too_long(sound.frames / rate, max_s)
    return _mono(sound.samples(), rate, rate_hertz)


def read_audio_file(
    path: Path, *, rate_hertz: int = INPUT_RATE_HERTZ, max_s: float = 3600.0
) -> Samples:
    """Decode a file of the operator, in any format of soundfile, to mono samples at `rate_hertz`.

    Files of clients are for `read_client_wav` only. Raises AudioError if the file cannot be decoded
    or is longer than `max_s`.
    """
    try:
        with path.open("rb") as stream, soundfile.SoundFile(stream) as sound:
            if sound.frames > max_s * sound.samplerate:
                raise too_long(sound.frames / sound.samplerate, max_s)
            # The number of frames is passed, because soundfile cannot find it in every codec.
            read = sound.read(frames=sound.frames, dtype="float32", always_2d=True)
            decoded = np.asarray(read, np.float32)
            rate = int(sound.samplerate)
    except OSError as error:
        raise AudioError(f"cannot be read: {error.strerror}") from None
    except (soundfile.SoundFileError, ValueError, TypeError) as error:
        if isinstance(error, AudioError):
            raise
        raise AudioError("is not a readable audio file") from None
    return _mono(decoded, rate, rate_hertz)


def _mono(decoded: Samples, from_hertz: int, to_hertz: int) -> Samples:
    """Mix channels [samples, channels], convert the rate and check the samples."""
    with np.errstate(invalid="ignore"):  # the check refuses sums of infinities
        samples = decoded.mean(axis=1, dtype=np.float32)
    return samples_from_pcm(pcm_from_samples(resample(samples, from_hertz, to_hertz)))


def resample(samples: Samples, from_hertz: int, to_hertz: int) -> Samples:
    """Convert samples to another rate."""
    if from_hertz == to_hertz:
        return samples
    return np.asarray(soxr.resample(samples, from_hertz, to_hertz), dtype=np.float32)


def resample_pcm(pcm: bytes, from_hertz: int, to_hertz: int) -> bytes:
    """Convert a whole sound to another rate. Equal rates copy nothing."""
    if from_hertz == to_hertz or not pcm:
        return pcm
    return pcm_from_samples(resample(np.frombuffer(pcm, "<f4"), from_hertz, to_hertz))
