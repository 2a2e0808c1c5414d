"""Converts a stream of sound to another sample rate, piece by piece. Pure."""

from __future__ import annotations

import math

import numpy as np

from duplane.fabric.audio import Samples, pcm_from_samples, resample

# The filter of soxr reaches this many samples of the lower rate to both sides of a sample.
_REACH = 100


class Resampler:
    """Converts one stream of PCM (mono float32). Its pieces may be of any length.

    Each sample that comes out depends on the samples on both sides of it, so the last `reach`
    samples of the stream (6.25 ms at 16 kHz) are kept until more sound comes or the stream ends.
    After n samples, (n - reach) * to_hertz // from_hertz samples have come out, and after the end
    n * to_hertz // from_hertz, however the stream is cut into pieces. With `is_prompt`, the stream
    begins with `reach` samples of silence: then n * to_hertz // from_hertz samples have come out at
    any time, and the sound comes 6.25 ms late.

    `soxr.ResampleStream` does not fit: it holds back as much as 75 ms, which varies from piece to
    piece, so a unit would often be incomplete when its last sample is known. This class resamples
    windows that overlap as far as the filter reaches.
    """

    def __init__(self, from_hertz: int, to_hertz: int, *, is_prompt: bool = False) -> None:
        self._from_hertz = from_hertz
        self._to_hertz = to_hertz
        divisor = math.gcd(from_hertz, to_hertz)
        # `_down` samples last as long as `_up` samples after the conversion.
        self._up = to_hertz // divisor
        self._down = from_hertz // divisor
        self._reach = -(-_REACH * from_hertz // min(from_hertz, to_hertz))
        self._silence = np.zeros(self._reach, np.float32)
        self._is_prompt = is_prompt
        self._begin()

    def _begin(self) -> None:
        """Begin a stream."""
        # The samples from number `_start` on, which is a multiple of `_down`.
        self._heard = self._silence if self._is_prompt else self._silence[:0]
        self._start = 0
        self._given_count = 0  # samples that have come out

    def add(self, pcm: bytes) -> bytes:
        """Add a piece of the stream; return the samples that come out now, perhaps none."""
        return pcm_from_samples(self._add(np.frombuffer(pcm, "<f4")))

    def count_with(self, added_count: int) -> int:
        """Return how many samples would come out if this many samples were added."""
        known_count = self._start + self._heard.size + added_count - self._reach
        return max(0, known_count) * self._up // self._down - self._given_count

    def end(self) -> bytes:
        """End the stream and return its last samples. Then another stream may begin."""
        last = self._add(self._silence)
        self._begin()
        return pcm_from_samples(last)

    def _add(self, samples: Samples) -> Samples:
        self._heard = np.concatenate((self._heard, samples))
        known_count = self._start + self._heard.size - self._reach
        count = max(0, known_count) * self._up // self._down
        first = self._start * self._up // self._down  # number of the window's first sample
        window = resample(self._heard, self._from_hertz, self._to_hertz)
        piece = window[self._given_count - first : count - first]
        self._given_count = count
        # The next sample that comes out needs the samples from here on.
        needed = max(0, count * self._down // self._up - self._reach) // self._down * self._down
        self._heard = self._heard[needed - self._start :]
        self._start = needed
        return piece


def resampler(from_hertz: int, to_hertz: int, *, is_prompt: bool = False) -> Resampler | None:
    """Return a new resampler; None if the rates are equal."""
    if from_hertz == to_hertz:
        return None
    return Resampler(from_hertz, to_hertz, is_prompt=is_prompt)
