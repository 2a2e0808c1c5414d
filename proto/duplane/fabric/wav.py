"""Reads WAV files of clients: plain PCM and float samples only, in Python and numpy.

Libraries for sound files read many formats in C; bytes of clients do not reach them. This parser
walks the chunks up to `data`. It believes no size in the file: a chunk ends with the file at the
latest, and nothing is allocated before its bytes are there.

Formats: RIFF/WAVE (Multimedia Programming Interface 1.0) with WAVEFORMAT, WAVEFORMATEX or
WAVEFORMATEXTENSIBLE.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_HEAD = struct.Struct("<4sI4s")
_CHUNK = struct.Struct("<4sI")
_FORMAT = struct.Struct("<HHIIHH")
_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_SUBFORMAT = slice(24, 40)
# The subformats of WAVEFORMATEXTENSIBLE are GUIDs: the format, followed by these bytes.
_GUID_TAIL = bytes.fromhex("000000001000800000aa00389b71")
_PLAIN = "PCM of 8, 16, 24 or 32 bits or float of 32 or 64"
_MAX_CHUNKS = 64  # before `data`; a file of more is refused, because each costs time


class WavError(ValueError):
    """A file that is no WAV file of plain samples. The message gives the reason."""


@dataclass(frozen=True)
class WavSound:
    """The sound of a WAV file that is not decoded yet. `frames` is the number of its moments."""

    rate_hertz: int
    channels: int
    is_float: bool
    sample_bytes: int
    content: memoryview

    @property
    def frames(self) -> int:
        return len(self.content) // (self.channels * self.sample_bytes)

    def samples(self) -> NDArray[np.float32]:
        """Decode to float32 [frames, channels]. Full scale of integers is 1.0."""
        size = self.frames * self.channels * self.sample_bytes
        decoded = _decoded(self.content[:size], self.sample_bytes, is_float=self.is_float)
        return decoded.reshape(-1, self.channels)


def open_wav(file: bytes) -> WavSound:
    """Read the header of a WAV file. Raises WavError."""
    view = memoryview(file)
    if len(file) < _HEAD.size:
        raise WavError("is not a readable WAV file")
    riff, _, wave = _HEAD.unpack_from(file)
    if (riff, wave) != (b"RIFF", b"WAVE"):
        raise WavError("is not a readable WAV file")
    at, form = _HEAD.size, b""
    for _ in range(_MAX_CHUNKS):
        if at + _CHUNK.size > len(file):
            break
        name, size = _CHUNK.unpack_from(file, at)
        at += _CHUNK.size
        if name == b"data":
            if not form:
                break
            # A program that writes to a pipe does not know the size. It states 0 or too much.
            return _sound(form, view[at : at + size] if size else view[at:])
        if name == b"fmt ":
            form = bytes(view[at : at + min(size, _SUBFORMAT.stop)])
        at += size + size % 2  # chunks begin at even positions
    raise WavError("is not a readable WAV file")


def _sound(form: bytes, content: memoryview) -> WavSound:
    if len(form) < _FORMAT.size:
        raise WavError("is not a readable WAV file")
    kind, channels, rate_hertz, _, frame_bytes, bits = _FORMAT.unpack_from(form)
    if kind == _EXTENSIBLE and form[_SUBFORMAT][2:] == _GUID_TAIL:
        kind = int.from_bytes(form[_SUBFORMAT][:2], "little")
    is_plain = (kind == _PCM and bits in (8, 16, 24, 32)) or (kind == _FLOAT and bits in (32, 64))
    if not is_plain:
        raise WavError(f"has samples of format {kind} with {bits} bits, must be {_PLAIN}")
    sample_bytes = bits // 8
    if frame_bytes != channels * sample_bytes or not channels:
        raise WavError("is not a readable WAV file")
    return WavSound(rate_hertz, channels, kind == _FLOAT, sample_bytes, content)


def _decoded(content: memoryview, sample_bytes: int, *, is_float: bool) -> NDArray[np.float32]:
    if is_float:
        with np.errstate(over="ignore"):  # too large for float32: infinite, which is refused later
            return np.frombuffer(content, f"<f{sample_bytes}").astype(np.float32)
    if sample_bytes == 1:  # the only size without a sign
        middle = np.float32(128)
        return (np.frombuffer(content, np.uint8).astype(np.float32) - middle) / middle
    if sample_bytes == 3:
        # The three bytes become the upper ones of 32 bits.
        wide = np.zeros((len(content) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(content, np.uint8).reshape(-1, 3)
        integers = wide.reshape(-1).view("<i4")
    else:
        integers = np.frombuffer(content, f"<i{sample_bytes}")
    bits = 32 if sample_bytes == 3 else 8 * sample_bytes
    return integers.astype(np.float32) / np.float32(2.0 ** (bits - 1))
