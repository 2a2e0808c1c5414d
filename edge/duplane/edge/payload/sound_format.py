"""Formats of raw sound in the public protocols, and their conversion from and to the contract's.

The contract has mono float32 PCM (little endian). Dialects A to D have the same. The protocols of
OpenAI have int16 PCM and G.711 (ITU-T G.711, which telephones use).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cache

import numpy as np
from numpy.typing import NDArray

from duplane.edge.payload.rates import INPUT_RATE_HERTZ, OUTPUT_RATE_HERTZ
from duplane.fabric.audio import Samples, pcm_from_samples

_Codes = NDArray[np.uint8]
_Levels = NDArray[np.int16]

_INT16_SCALE = np.float32(32768)
# In mu-law, this bias is added to each magnitude, and larger magnitudes are cut.
_ULAW_BIAS = 132
_ULAW_MAX = 32635


class Encoding(StrEnum):
    """How samples are written. The values are the `dtype` of recordings."""

    FLOAT32 = "float32-le"
    INT16 = "int16-le"
    ULAW = "g711-ulaw"
    ALAW = "g711-alaw"


_SAMPLE_BYTES = {Encoding.FLOAT32: 4, Encoding.INT16: 2, Encoding.ULAW: 1, Encoding.ALAW: 1}
_SUFFIXES = {
    Encoding.FLOAT32: "f32",
    Encoding.INT16: "pcm",
    Encoding.ULAW: "ulaw",
    Encoding.ALAW: "alaw",
}
RAW_SUFFIXES = tuple(_SUFFIXES.values())
"""The file name suffixes of raw sound."""


@dataclass(frozen=True, slots=True)
class SoundFormat:
    """The encoding and the sample rate of mono sound without a header."""

    encoding: Encoding
    rate_hertz: int

    @property
    def sample_bytes(self) -> int:
        """The number of bytes of one sample."""
        return _SAMPLE_BYTES[self.encoding]

    @property
    def suffix(self) -> str:
        """The suffix of a file with such sound."""
        return _SUFFIXES[self.encoding]

    def decode(self, sound: bytes) -> bytes:
        """Return float32 PCM. `sound` must be a whole number of samples."""
        match self.encoding:
            case Encoding.FLOAT32:
                return sound
            case Encoding.INT16:
                levels = np.frombuffer(sound, "<i2")
            case Encoding.ULAW | Encoding.ALAW:
                levels = _levels(self.encoding)[np.frombuffer(sound, np.uint8)]
        return pcm_from_samples(levels.astype(np.float32) / _INT16_SCALE)

    def encode(self, pcm: bytes) -> bytes:
        """Return float32 PCM in this format. Samples outside of -1 to 1 are clipped."""
        if self.encoding is Encoding.FLOAT32:
            return pcm
        levels = _int16(np.frombuffer(pcm, "<f4"))
        if self.encoding is Encoding.INT16:
            return levels.astype("<i2", copy=False).tobytes()
        return _codes(self.encoding)[levels.view(np.uint16)].tobytes()


INPUT_SOUND = SoundFormat(Encoding.FLOAT32, INPUT_RATE_HERTZ)
"""What the clients of A to D send."""
OUTPUT_SOUND = SoundFormat(Encoding.FLOAT32, OUTPUT_RATE_HERTZ)
"""What the clients of A to D get."""


def _int16(samples: Samples) -> _Levels:
    scaled = samples * _INT16_SCALE
    np.rint(scaled, out=scaled)
    return np.clip(scaled, -_INT16_SCALE, _INT16_SCALE - 1, out=scaled).astype(np.int16)


@cache
def _levels(encoding: Encoding) -> _Levels:
    """Return the int16 sample of each of the 256 codes of G.711."""
    codes = np.arange(256)
    if encoding is Encoding.ULAW:
        inverted = ~codes & 0xFF
        exponents = (inverted >> 4) & 7
        magnitudes = ((((inverted & 15) << 3) + _ULAW_BIAS) << exponents) - _ULAW_BIAS
        return np.where(inverted & 0x80, -magnitudes, magnitudes).astype(np.int16)
    toggled = codes ^ 0x55
    exponents = (toggled >> 4) & 7
    steps = ((toggled & 15) << 4) + 8
    magnitudes = np.where(exponents, (steps + 256) << np.maximum(exponents - 1, 0), steps)
    return np.where(toggled & 0x80, magnitudes, -magnitudes).astype(np.int16)


@cache
def _codes(encoding: Encoding) -> _Codes:
    """Return the code of each int16 sample, by its bits as an unsigned number."""
    samples = np.arange(65_536).astype(np.uint16).view(np.int16).astype(np.int32)
    if encoding is Encoding.ULAW:
        biased = np.minimum(np.abs(samples), _ULAW_MAX) + _ULAW_BIAS
        exponents = _bit_count(biased) - 8
        mantissas = (biased >> (exponents + 3)) & 15
        return (~((samples < 0) * 0x80 | exponents << 4 | mantissas) & 0xFF).astype(np.uint8)
    magnitudes = np.where(samples < 0, ~samples, samples) >> 3
    exponents = np.maximum(_bit_count(magnitudes) - 5, 0)
    mantissas = (magnitudes >> np.maximum(exponents, 1)) & 15
    return (((samples >= 0) * 0x80 | exponents << 4 | mantissas) ^ 0x55).astype(np.uint8)


def _bit_count(numbers: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the number of binary digits of each number."""
    return np.frexp(numbers)[1]
