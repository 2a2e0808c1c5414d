"""Passes of one row per slot, over tensors that stay where they are: nothing is sent in between.

What runs over such steps can be captured as a CUDA graph, and does the same where it is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from duplane.worker.model.cache import KVCache, Rows, Run
from duplane.worker.model.transfer import upload


class Steps:
    """One row of each of some slots per pass, each behind the last.

    `slots` and `positions` [slots] are on the device; `advance` moves the positions on in place.
    Every pass attends to a view of `length` rows, masked beyond its own.
    """

    def __init__(self, cache: KVCache, slots: Sequence[int], length: int) -> None:
        device = cache.keys.device
        self._scratch, self._slots, self._length = cache.capacity, tuple(slots), length
        self._columns = torch.arange(length, device=device)
        self._last = torch.arange(len(slots), device=device)
        self.slots = upload(self._slots, device)
        self.positions = torch.full_like(self.slots, cache.capacity)

    def begin(self, positions: Sequence[int]) -> None:
        """Let the next pass add these rows; `cache.capacity` is a row that nobody sees."""
        self.positions.copy_(upload(positions, self.positions.device))

    def rows(self) -> Rows:
        """The rows of the next pass."""
        masks = self._columns <= self.positions[:, None, None, None]
        runs = tuple(
            Run(first, self._slots[first], stop - first, 1, self._length, masks[first:stop])
            for first, stop in pairwise(self._bounds())
        )
        return Rows(self.slots, self.positions, runs, self._last)

    def advance(self) -> None:
        """Go on to the pass after."""
        self.positions.add_(1).clamp_(max=self._scratch)

    def _bounds(self) -> list[int]:
        """Where the stretches of neighbouring slots begin, and their end."""
        places = range(1, len(self._slots))
        breaks = [at for at in places if self._slots[at] != self._slots[at - 1] + 1]
        return [0, *breaks, len(self._slots)]


def plan_steps(cache: KVCache, slots: Sequence[int], count: int) -> Steps:
    """Make room for `count` rows behind what each slot, ascending, holds, and plan their passes."""
    starts = [cache.length(slot) for slot in slots]
    steps = Steps(cache, slots, max(starts) + count)
    cache.grow([(slot, count) for slot in slots])
    steps.begin(starts)
    return steps
