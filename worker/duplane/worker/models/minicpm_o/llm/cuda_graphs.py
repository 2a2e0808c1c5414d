"""CUDA graphs of decoder steps with one row per slot, over tensors with fixed addresses.

A step is captured for a number of rows. It can be replayed for any slots and lengths of contexts,
because its kernel reads the slots, the positions and the pages from the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch

from duplane.worker.models.minicpm_o.blocks import graph
from duplane.worker.models.minicpm_o.llm.attention import Rows, Tiles
from duplane.worker.models.minicpm_o.llm.kv_cache import KVCache
from duplane.worker.models.minicpm_o.proof import FIRST_ROWS, TOLERANCES, Proofs
from duplane.worker.models.minicpm_o.transfer import upload


class StaticRows:
    """The rows of passes with one row per slot, for up to `width` slots.

    Nothing is uploaded between two passes. The first rows belong to the slots of the pass. The
    remaining rows are padding, and belong to the scratch page.
    """

    def __init__(self, cache: KVCache, width: int) -> None:
        self._cache, self._width = cache, width
        self._numbers = torch.zeros(4 * width, dtype=torch.long, device=cache.keys.device)
        tiles, self._positions = self._numbers.split_with_sizes([3 * width, width])
        self._tiles = Tiles(tiles.view(width, 3), cache.capacity)
        self.begin((), ())

    def begin(self, slots: Sequence[int], positions: Sequence[int]) -> None:
        """Set the slots of the next passes, and the position of each slot's next row."""
        padding = self._width - len(slots)
        owners = *slots, *[self._cache.slot_count] * padding
        tiles = [number for row, slot in enumerate(owners) for number in (slot, row, 1)]
        numbers = *tiles, *positions, *[0] * padding
        self._numbers.copy_(upload(numbers, self._numbers.device, torch.long))

    def rows(self) -> Rows:
        """Return the rows of the next pass."""
        slots, order, _ = self._tiles.numbers.unbind(1)
        places = self._cache.pages.rows_at(slots, self._positions)
        return Rows(self._positions, places, order, self._tiles)

    def advance(self) -> None:
        """Move every position to the next row."""
        self._positions.add_(1).clamp_(max=self._cache.capacity - 1)


class StaticStep(Protocol):
    """A step over tensors with fixed addresses."""

    def run(self) -> None: ...


S = TypeVar("S", bound=StaticStep)


class StepGraphs(Generic[S]):
    """The captured steps of one decoder, keyed by number of rows."""

    def __init__(self, cache: KVCache, name: str) -> None:
        self._cache = cache
        self._name = name
        self._steps: dict[int, tuple[S, Callable[[], None]]] = {}

    def capture(
        self,
        make: Callable[[int], S],
        check: Callable[[S, Callable[[], None], int], float],
        *,
        is_replayed: bool = True,
    ) -> None:
        """Make a step for 1, 2, 4 ... rows. If `is_replayed`, capture the steps as CUDA graphs.

        `check(step, run, width)` returns the relative error of a step. Steps that cannot be
        captured, or whose results differ from those of the plain path, are left out; see `proof`.
        Without a kernel for attention there are no steps. All slots must be empty.
        """
        if self._cache.kernel is None:
            return
        pool: Any = None
        proofs = Proofs(f"CUDA graphs of the {self._name}")
        most = self._cache.slot_count
        widths = {most, *(1 << power for power in range((most - 1).bit_length()))}
        # The largest is first, so that smaller steps use the memory of larger ones.
        for width in sorted(widths, reverse=True):
            step = make(width)
            run = step.run

            def capture_and_check(step: S = step, width: int = width) -> float:
                nonlocal pool, run
                captured = graph.Graph(step.run, pool)
                pool, run = captured.pool, captured.replay
                return check(step, run, width)

            allowed = TOLERANCES[self._cache.keys.dtype]
            if not is_replayed or proofs.accepts(f"{width} rows", capture_and_check, allowed):
                self._steps[width] = (step, run)
            for slot in range(width):
                self._cache.reset(slot)
        proofs.report()

    def find(self, count: int) -> tuple[S, Callable[[], None]] | None:
        """Return the smallest step for this number of slots, and the function that runs it."""
        widths = [width for width in self._steps if width >= count]
        return self._steps[min(widths)] if widths else None


def trial_lengths(cache: KVCache, width: int) -> list[int]:
    """Return lengths of contexts for a check, by slot: one has room for one more row only."""
    return [cache.capacity - 1, *[FIRST_ROWS] * (width - 1)]
