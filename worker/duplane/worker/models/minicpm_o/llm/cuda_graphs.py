"""CUDA graphs of decoder passes of fixed sizes, over tensors with fixed addresses.

A pass is captured for a number of rows. It can be replayed for any slots and lengths of contexts,
because its kernel reads the slots, the positions and the pages from the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import Generic, TypeVar

import numpy as np
from torch import Tensor

from duplane.worker.models.minicpm_o.blocks.block import Numbers
from duplane.worker.models.minicpm_o.blocks.graph import Capturable, Captures
from duplane.worker.models.minicpm_o.llm.attention import Rows, Tiles, plan_tiles
from duplane.worker.models.minicpm_o.llm.kv_cache import KVCache
from duplane.worker.models.minicpm_o.proof import TOLERANCES
from duplane.worker.models.minicpm_o.transfer import refill


class PassForm:
    """A pass of fixed size over a cache: `rows` packed rows of at most `slots` slots.

    The first rows belong to the slots, slot after slot. The others are padding, and belong to the
    scratch page.
    """

    def __init__(self, cache: KVCache, rows: int, slots: int) -> None:
        self.rows, self.slots, self._cache = rows, slots, cache
        # The last tile of each slot, and of the padding, may not be full.
        self._tiles = min(rows, -(-rows // cache.tile_rows) + slots + 1)
        self.count = 3 * self._tiles + 2 * rows + slots

    def numbers(
        self, counts: Sequence[tuple[int, int]] = (), starts: Sequence[int] = ()
    ) -> Numbers:
        """Return the `count` numbers of a pass of `(slot, rows)` with these first positions."""
        stops = [*accumulate((count for _, count in counts), initial=0)]
        scratch, filled = self._cache.slot_count, stops[-1]
        spans = [*counts, (scratch, self.rows - filled)]
        tiles = plan_tiles(spans, self._cache.tile_rows)
        tiles += [(scratch, 0, 0)] * (self._tiles - len(tiles))
        slots, rows = np.asarray(spans, np.int64).T
        positions = np.arange(self.rows) + np.subtract([*starts, 0], stops).repeat(rows)
        positions[filled:] = 0
        ends = np.zeros(self.slots, np.int64)
        ends[: len(counts)] = np.subtract(stops[1:], 1)
        return np.concatenate((np.ravel(tiles), slots.repeat(rows), positions, ends))

    def rows_of(self, numbers: Tensor) -> Rows:
        """Return the rows of the pass whose numbers these are, on the device."""
        sizes = 3 * self._tiles, self.rows, self.rows, self.slots
        tiles, slots, positions, ends = numbers[: self.count].split_with_sizes(sizes)
        places = self._cache.pages.rows_at(slots, positions)
        return Rows(positions, places, ends, Tiles(tiles.view(-1, 3), self._cache.capacity))


class StaticPass:
    """A pass of one form over tensors with fixed addresses, of which `numbers` begin with its own.

    `launch` gives its rows to `compute`, and can be captured.
    """

    def __init__(self, form: PassForm, numbers: Tensor, compute: Callable[[Rows], None]) -> None:
        self.form, self.numbers, self._compute = form, numbers, compute
        refill(numbers[: form.count], form.numbers())

    def launch(self) -> None:
        """Compute the pass without a wait."""
        self._compute(self.form.rows_of(self.numbers))


P = TypeVar("P", bound=Capturable)


class PassGraphs(Generic[P]):
    """The captured passes of one kind, keyed by size."""

    def __init__(self, cache: KVCache, name: str) -> None:
        self._cache = cache
        self._name = name
        self._passes: dict[int, P] = {}

    def capture(
        self,
        sizes: Iterable[int],
        make: Callable[[int], P],
        check: Callable[[P], float],
        *,
        is_replayed: bool = True,
    ) -> None:
        """Make a pass of each size. If `is_replayed`, capture the passes as CUDA graphs.

        `check(pass)` returns the relative error of a pass. Passes that cannot be captured, or
        whose results differ from those of the plain path, are left out; see `proof`. Without a
        kernel for attention there are no passes. All slots must be empty.
        """
        if self._cache.kernel is None:
            return
        captures = Captures(f"the {self._name}", TOLERANCES[self._cache.keys.dtype])
        # The largest is first, so that smaller passes use the memory of larger ones.
        for size in sorted(sizes, reverse=True):
            made = make(size)
            if not is_replayed or captures.capture(f"{size} rows", made, partial(check, made)):
                self._passes[size] = made
            for slot in range(self._cache.slot_count):
                self._cache.reset(slot)
        captures.report()

    def find(self, size: int) -> P | None:
        """Return the smallest pass with this size."""
        sizes = [found for found in self._passes if found >= size]
        return self._passes[min(sizes)] if sizes else None
