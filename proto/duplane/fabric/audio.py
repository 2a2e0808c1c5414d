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


def read_audio_file(
    source: Path | bytes, *, rate_hertz: int = INPUT_RATE_HERTZ, max_s: float = 3600.0
) -> Samples:
    """Decode any file soundfile knows, mix it down, resample it to `rate_hertz`.

    Raises AudioError when it cannot be decoded or lasts longer than `max_s`.
    """
    try:
        stream = io.BytesIO(source) if isinstance(source, bytes) else source
        with soundfile.SoundFile(stream) as sound:
            if sound.frames > max_s * sound.samplerate:
                raise AudioError(f"audio lasts more than {max_s:g} s")
            decoded = sound.read(dtype="float32", always_2d=True)
            rate = int(sound.samplerate)
    except soundfile.LibsndfileError as error:
        # Its own text names the Python object that was read.
        raise AudioError(f"not a readable audio file: {error.error_string}") from None
    except OSError as error:
        raise AudioError(f"not a readable audio file: {error}") from None
    samples = decoded.mean(axis=1, dtype=np.float32)
    return samples_from_pcm(pcm_from_samples(resample(samples, rate, rate_hertz)))


def resample(samples: Samples, from_hertz: int, to_hertz: int) -> Samples:
    """Return the same sound at another rate."""
    if from_hertz == to_hertz:
        return samples
    return np.asarray(soxr.resample(samples, from_hertz, to_hertz), dtype=np.float32)
