"""The noise of HiFT's source: each sample follows from the conversation's seed and its number.

The samples are computed with whole numbers and one table, so they are the same on every device. A
conversation that has only to continue the noise needs the number of its next sample.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

_BITS = 16  # of a hash that choose a value in the table
_WORD = (1 << 32) - 1
# Both factors are below 2 ** 31, so that products with numbers of 32 bits fit into int64.
_FACTORS = (0x21F0AAAD, 0x735A2D97)


@dataclass
class NoiseCounter:
    """The noise of one conversation: two numbers of 32 bits, and the number of the next sample.

    The noise repeats after 2 ** 32 samples, which is 49 hours of speech.
    """

    factor: int
    offset: int
    position: int = 0

    @classmethod
    def of_seed(cls, seed: int | None) -> NoiseCounter:
        """Begin the noise of a seed; without a seed, of random numbers."""
        key = secrets.token_bytes(8)
        if seed is not None:
            key = hashlib.blake2b(str(seed).encode(), digest_size=8).digest()
        factor, offset = int.from_bytes(key[:4]), int.from_bytes(key[4:])
        return cls(factor >> 1 | 1, offset)

    @property
    def numbers(self) -> tuple[int, int, int]:
        """What `NoiseTable.noise` needs: factor, offset and position."""
        return self.factor, self.offset, self.position & _WORD


class NoiseTable:
    """The values of normal noise, on a device: one for each number of 16 bits."""

    def __init__(self, device: torch.device) -> None:
        shares = (torch.arange(1 << _BITS, dtype=torch.float64) + 0.5) / (1 << _BITS)
        # torch ships no types for its special functions.
        values = cast("Tensor", cast("Any", torch.special).ndtri(shares))
        self.values = values.to(torch.float32).to(device)

    def noise(self, numbers: Tensor, samples: int) -> Tensor:
        """Return the next samples [counters, samples] of counters with `numbers` [counters, 3]."""
        factor, offset, position = numbers.T[:, :, None]
        at = (position + torch.arange(samples, device=self.values.device)) & _WORD
        word = (at * factor + offset) & _WORD
        for shift, by in zip((16, 15), _FACTORS, strict=True):
            word = ((word ^ (word >> shift)) * by) & _WORD
        return self.values[(word ^ (word >> 15)) >> (32 - _BITS)]
