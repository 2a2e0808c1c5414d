"""One direction's audio as a WAV file that only grows and can be read at any moment."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np

from duplane.fabric.audio import Samples

_HEADER = struct.Struct("<4sI4s4sIHHIIHH4sI")
_SAMPLE_BYTES = 2
# Audio that comes within this of the end of what was before follows without a gap: the network's
# jitter is no pause.
_SLACK_S = 0.3
# A WAV file counts in 32 bits; the events go on.
MAX_TRACK_S = 12 * 3600.0


class Track:
    """PCM16 mono, placed on the recording's time line; silence in between takes no room on disk.

    The header is true after every append: a process that is killed leaves a sound WAV file.
    Every method may raise OSError.
    """

    def __init__(self, path: Path, rate_hertz: int) -> None:
        self._rate_hertz = rate_hertz
        self._sample_count = 0
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self._write(self._header(), 0)

    @property
    def end_s(self) -> float:
        """Where what is there ends."""
        return self._sample_count / self._rate_hertz

    def append(self, samples: Samples, at_s: float) -> int:
        """Add audio that belongs at `at_s`, or as early after it as what is there allows.

        Returns the bytes written, 0 beyond the end of what a track can hold.
        """
        start = max(self._sample_count, round(at_s * self._rate_hertz))
        if start - self._sample_count <= _SLACK_S * self._rate_hertz:
            start = self._sample_count
        if start + samples.size > MAX_TRACK_S * self._rate_hertz:
            return 0
        whole = np.nan_to_num(samples, nan=0.0, posinf=1.0, neginf=-1.0).clip(-1.0, 1.0) * 32767
        pcm = whole.astype("<i2").tobytes()
        self._write(pcm, _HEADER.size + start * _SAMPLE_BYTES)
        self._sample_count = start + samples.size
        self._write(self._header(), 0)
        return len(pcm)

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._file)

    def _write(self, content: bytes, at: int) -> None:
        rest = memoryview(content)
        while rest:
            written = os.pwrite(self._file, rest, at)
            rest, at = rest[written:], at + written

    def _header(self) -> bytes:
        size = self._sample_count * _SAMPLE_BYTES
        return _HEADER.pack(
            *(b"RIFF", _HEADER.size - 8 + size, b"WAVE"),
            *(b"fmt ", 16, 1, 1, self._rate_hertz, self._rate_hertz * _SAMPLE_BYTES),
            *(_SAMPLE_BYTES, _SAMPLE_BYTES * 8),
            *(b"data", size),
        )
