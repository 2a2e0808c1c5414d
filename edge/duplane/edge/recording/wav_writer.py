"""WAV files of one direction of a session, which can be read at any moment, and of one event."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np

from duplane.fabric.audio import Samples

_HEADER = struct.Struct("<4sI4s4sIHHIIHH4sI")
_SAMPLE_BYTES = 2
# Audio that begins less than this many seconds after the end of the file is appended without a gap,
# because a small delay of the network is not a pause in the speech.
_MAX_JITTER_S = 0.3
# The sizes in a WAV header have 32 bits, so longer audio does not fit into a file. The events of a
# longer session are still recorded.
MAX_WAV_S = 12 * 3600.0


class WavWriter:
    """Writes mono PCM16 at given times of a recording. Gaps are not written; they read as silence.

    The header is updated after every append, so the file stays valid if the process is killed.
    Every method may raise OSError.
    """

    def __init__(self, path: Path, rate_hertz: int) -> None:
        self._rate_hertz = rate_hertz
        self._sample_count = 0
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self._write(_header(self._sample_count, self._rate_hertz), 0)

    @property
    def end_s(self) -> float:
        """The end of the written audio, in seconds from the start of the recording."""
        return self._sample_count / self._rate_hertz

    def append(self, samples: Samples, at_s: float) -> int:
        """Write audio at `at_s`, or at the end of the file if the end is later.

        Returns the number of bytes written, which is 0 if the audio would exceed `MAX_WAV_S`.
        """
        start = max(self._sample_count, round(at_s * self._rate_hertz))
        if start - self._sample_count <= _MAX_JITTER_S * self._rate_hertz:
            start = self._sample_count
        if start + samples.size > MAX_WAV_S * self._rate_hertz:
            return 0
        pcm = _pcm16(samples)
        self._write(pcm, _HEADER.size + start * _SAMPLE_BYTES)
        self._sample_count = start + samples.size
        self._write(_header(self._sample_count, self._rate_hertz), 0)
        return len(pcm)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _write(self, content: bytes, at: int) -> None:
        rest = memoryview(content)
        while rest:
            written = os.pwrite(self._file, rest, at)
            rest, at = rest[written:], at + written


def wav_file(samples: Samples, rate_hertz: int) -> bytes:
    """Return a whole WAV file (mono, PCM16)."""
    return _header(samples.size, rate_hertz) + _pcm16(samples)


def _pcm16(samples: Samples) -> bytes:
    scaled = np.nan_to_num(samples, nan=0.0, posinf=1.0, neginf=-1.0).clip(-1.0, 1.0) * 32767
    return scaled.astype("<i2").tobytes()


def _header(sample_count: int, rate_hertz: int) -> bytes:
    size = sample_count * _SAMPLE_BYTES
    whole = (b"RIFF", _HEADER.size - 8 + size, b"WAVE")
    rates = (rate_hertz, rate_hertz * _SAMPLE_BYTES)
    form = (b"fmt ", 16, 1, 1, *rates, _SAMPLE_BYTES, _SAMPLE_BYTES * 8)
    return _HEADER.pack(*whole, *form, b"data", size)
