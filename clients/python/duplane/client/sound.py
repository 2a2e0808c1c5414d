"""Sound of any rate as the appends of a session: 16 kHz, mono, int16 or float32. Pure.

The filter is a windowed sinc (Kaiser window). Its state lasts from one call to the next, so that
pieces of a stream join without a click.
"""

from __future__ import annotations

import base64
import math
import operator
import struct
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from duplane.client.events import INPUT_RATE, little_endian

if TYPE_CHECKING:
    from typing_extensions import Buffer

Uplink = Literal["int16", "float32"]

MIN_RATE, MAX_RATE = 8_000, 192_000
_CROSSINGS = 24  # of the sinc with zero, on each side
_CUTOFF = 0.92  # of the lower Nyquist frequency
_BETA = 9.0  # of the Kaiser window: aliases are 90 dB below the sound or less
_INT16 = 32768.0


def samples_of(sound: Buffer) -> array[float]:
    """Return mono samples in float32. Bytes mean int16; items may be int16 or float.

    Raises ValueError.
    """
    view = memoryview(sound)
    if view.ndim != 1 or not view.contiguous:
        raise ValueError("the sound must be mono, and one contiguous block")
    if view.format in ("B", "b", "c"):
        if len(view) % 2:
            raise ValueError("bytes must be a whole number of int16 samples")
        levels = struct.unpack(f"<{len(view) // 2}h", view)
        return array("f", (level / _INT16 for level in levels))
    match view.format.lstrip("<=@"):
        case "h":
            return array("f", (level / _INT16 for level in view.tolist()))
        case "f" | "d":
            samples = array("f", view.tolist())
        case other:
            raise ValueError(f"samples of format {other!r} must be int16 or float")
    if not all(map(math.isfinite, samples)):
        raise ValueError("samples must be finite")
    return samples


class Resampler:
    """Converts a stream from one rate to 16 kHz."""

    def __init__(self, rate: int) -> None:
        if not MIN_RATE <= rate <= MAX_RATE:
            raise ValueError(f"rate is {rate}, must be from {MIN_RATE} to {MAX_RATE} Hz")
        self.rate = rate
        divisor = math.gcd(rate, INPUT_RATE)
        self._up, self._down = INPUT_RATE // divisor, rate // divisor
        self._scale = min(1.0, INPUT_RATE / rate) * _CUTOFF
        self._half = math.ceil(_CROSSINGS / self._scale)
        self._filters: dict[int, list[float]] = {}  # one for each position between two samples
        self._waiting = [0.0] * (self._half - 1)  # the sound that later outputs need
        self._position = 0  # of the next output after the first one, in 1/up of an input sample

    def add(self, samples: array[float]) -> array[float]:
        """Return the next samples of the stream at 16 kHz."""
        if self._up == self._down:
            return samples
        waiting = [*self._waiting, *samples]
        made: array[float] = array("f")
        width = 2 * self._half
        while True:
            at, phase = divmod(self._position, self._up)
            if at + width > len(waiting):
                break
            taps = self._filters.get(phase) or self._taps(phase)
            made.append(sum(map(operator.mul, taps, waiting[at : at + width])))
            self._position += self._down
        at = min(self._position // self._up, len(waiting))
        self._position -= at * self._up
        self._waiting = waiting[at:]
        return made

    def tail(self) -> array[float]:
        """Return the last samples, which wait for more sound. The stream is over."""
        return array("f") if self._up == self._down else self.add(array("f", bytes(4 * self._half)))

    def _taps(self, phase: int) -> list[float]:
        """Return the filter for an output `phase / up` after the input sample `half - 1`."""
        offset = phase / self._up + self._half - 1
        taps = [self._tap(number - offset) for number in range(2 * self._half)]
        total = sum(taps)
        self._filters[phase] = [tap / total for tap in taps]
        return self._filters[phase]

    def _tap(self, distance: float) -> float:
        place = distance / self._half
        if abs(place) >= 1:
            return 0.0
        angle = math.pi * self._scale * distance
        sinc = math.sin(angle) / angle if angle else 1.0
        return sinc * _bessel(_BETA * math.sqrt(1 - place * place))


def _bessel(value: float) -> float:
    """Return the modified Bessel function I0."""
    total = term = 1.0
    for number in range(1, 40):
        term *= (value / (2 * number)) ** 2
        total += term
    return total


def encoded(samples: array[float], uplink: Uplink) -> bytes:
    """Return base64 of samples. Int16 is half as long, and is a WAV file, as the protocols demand.

    Samples outside of -1 to 1 are clipped in int16.
    """
    if uplink == "float32":
        return base64.b64encode(little_endian(samples))
    levels = array("h", (max(-32768, min(32767, round(each * _INT16))) for each in samples))
    content = little_endian(levels)
    size, rate = len(content), INPUT_RATE
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, rate, 2 * rate, 2, 16)
    head = struct.pack("<4sI4s", b"RIFF", 36 + size, b"WAVE")
    return base64.b64encode(head + form + struct.pack("<4sI", b"data", size) + content)


@dataclass(frozen=True, slots=True)
class EncodedSound:
    """Sound that is ready to be sent, to one session or many, as often as wanted."""

    pieces: tuple[bytes, ...] = field(repr=False)
    """Base64, each of at most a second."""


def encode(sound: Buffer, *, rate: int = INPUT_RATE, uplink: Uplink = "int16") -> EncodedSound:
    """Encode sound once, for `DuplexSession.send`. It is a whole, not a piece of a stream.

    Raises ValueError.
    """
    resampler = Resampler(rate)
    samples = resampler.add(samples_of(sound)) + resampler.tail()
    return EncodedSound(tuple(encoded(piece, uplink) for piece in pieces(samples) if piece))


def pieces(samples: array[float]) -> Iterator[array[float]]:
    """Yield parts of at most a second, so that each append is small. An empty sound is one part."""
    for at in range(0, max(len(samples), 1), INPUT_RATE):
        yield samples[at : at + INPUT_RATE]
