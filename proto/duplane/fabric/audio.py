"""PCM as it crosses the fabric (mono float32 little endian), and files made into it."""

# pyright: reportMissingTypeStubs=false

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import soundfile
import soxr
from numpy.typing import NDArray

INPUT_RATE_HERTZ = 16_000
OUTPUT_RATE_HERTZ = 24_000
_SAMPLE_BYTES = 4
# Full scale is 1.0; integer-scaled audio is tolerated, numbers that would overflow are not.
_MAX_AMPLITUDE = 1e6

Samples = NDArray[np.float32]


class AudioError(ValueError):
    """Bytes that are not the audio they should be; the message says why."""


class AudioTooLongError(AudioError):
    """It can be decoded, and lasts longer than it may."""


def samples_from_pcm(pcm: bytes) -> Samples:
    """View float32 bytes as samples, without a copy. Raises AudioError."""
    if len(pcm) % _SAMPLE_BYTES:
        raise AudioError(f"{len(pcm)} bytes is not a whole number of float32 samples")
    samples = np.frombuffer(pcm, dtype="<f4")
    # One pass finds NaN, infinities and overflow alike: comparisons with NaN are false.
    if samples.size and not float(np.abs(samples).max()) <= _MAX_AMPLITUDE:
        raise AudioError("samples must be finite")
    return samples


def pcm_from_samples(samples: Samples) -> bytes:
    """Return samples as float32 bytes."""
    return np.ascontiguousarray(samples, dtype="<f4").tobytes()


def is_wav(audio: bytes) -> bool:
    """Tell a RIFF/WAVE file from raw PCM."""
    return len(audio) >= 12 and audio[:4] == b"RIFF" and audio[8:12] == b"WAVE"


# What a stranger's file may make us decode: plain PCM at rates that microphones have.
_PLAIN_SUBTYPES = {"PCM_U8", "PCM_S8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE"}
_PLAIN_RATES_HERTZ = range(8_000, 48_001)
_PLAIN_CHANNELS = 2


def read_audio_file(
    source: Path | bytes,
    *,
    rate_hertz: int = INPUT_RATE_HERTZ,
    max_s: float = 3600.0,
    is_trusted: bool = True,
) -> Samples:
    """Decode any file soundfile knows, mix it down, resample it to `rate_hertz`.

    Of files that are not trusted only plain ones are decoded: PCM or float, 8 to 48 kHz, one or
    two channels; so their cost is bounded by `max_s`. Raises AudioError when a file cannot be
    decoded, is refused or lasts longer than `max_s`.
    """
    try:
        # A file's own name can stay out of the message: whoever gave it knows it.
        stream = io.BytesIO(source) if isinstance(source, bytes) else source.open("rb")
        with stream, soundfile.SoundFile(stream) as sound:
            if not is_trusted:
                _check_plain(sound)
            if sound.frames > max_s * sound.samplerate:
                raise AudioTooLongError(f"lasts more than {max_s:g} s")
            # The count is given because some codecs cannot seek to find it.
            decoded = sound.read(frames=sound.frames, dtype="float32", always_2d=True)
            rate = int(sound.samplerate)
    except OSError as error:
        raise AudioError(f"cannot be read: {error.strerror}") from None
    except (soundfile.SoundFileError, ValueError, TypeError) as error:
        if isinstance(error, AudioError):
            raise
        raise AudioError("is not a readable audio file") from None
    samples = decoded.mean(axis=1, dtype=np.float32)
    return samples_from_pcm(pcm_from_samples(resample(samples, rate, rate_hertz)))


def resample(samples: Samples, from_hertz: int, to_hertz: int) -> Samples:
    """Return the same sound at another rate."""
    if from_hertz == to_hertz:
        return samples
    return np.asarray(soxr.resample(samples, from_hertz, to_hertz), dtype=np.float32)


def _check_plain(sound: soundfile.SoundFile) -> None:
    if sound.subtype not in _PLAIN_SUBTYPES:
        raise AudioError(f"is {sound.subtype}, must be PCM or float")
    if sound.samplerate not in _PLAIN_RATES_HERTZ:
        raise AudioError(f"has {sound.samplerate} samples a second, must have 8000 to 48000")
    if not 1 <= sound.channels <= _PLAIN_CHANNELS:
        raise AudioError(f"has {sound.channels} channels, must have 1 or 2")
