"""CUDA graphs of decoder steps with one row per slot, over tensors with fixed addresses.

A step is captured for a number of slots (not for certain slots) and for a bound on the length of
their contexts. Because of its fixed sizes, a captured step also reads cache rows that are not in
use. It is replayed only if reading these rows takes less time than launching the kernels of an
ordinary pass one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from duplane.worker.models.minicpm_o.blocks import graph
from duplane.worker.models.minicpm_o.llm.kv_cache import Group, KVCache, Rows, causal_mask
from duplane.worker.models.minicpm_o.proof import TOLERANCES, Proofs
from duplane.worker.models.minicpm_o.transfer import upload

SHORTEST = 512
"""The smallest bound on the length of contexts; each further bound is twice the previous one."""
LAYER_LAUNCHES = 30
"""Number of kernels of one decoder layer in a pass with one row per slot."""
LAUNCH_S = 5e-6
"""Seconds to launch one kernel from Python."""
BYTES_PER_S = 4e12
"""Bytes that the device is assumed to read in a second (H200: at most 4.8e12)."""
GATHER_COST = 3
"""Number of memory passes over the rows of gathered slots: read, written and read again."""


class StaticRows:
    """The rows of passes with one row per slot, for up to `width` slots.

    Nothing is uploaded between two passes. Every pass reads `length` rows of the cache of each
    slot; a mask limits each query row to the rows up to its own position. If `width` is the number
    of all slots, row i belongs to slot i, and the cache is read in place. Otherwise the first rows
    belong to the slots of the pass, and their cache rows are gathered. The remaining rows are
    padding: their keys and values are written to the extra row after the cache's capacity.
    """

    def __init__(self, cache: KVCache, width: int, length: int) -> None:
        device = cache.keys.device
        self._cache = cache
        self._width = width
        self._length = length
        self._is_whole = width == cache.slot_count
        self._order = torch.arange(width, device=device)
        self.slots = self._order.clone()
        self.positions = torch.full_like(self.slots, cache.capacity)

    def begin(self, slots: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Set the slots of the next passes, and the position of each slot's next row.

        Returns the index of each slot's row within a pass.
        """
        index = slots if self._is_whole else range(len(slots))
        all_slots = list(range(self._width)) if self._is_whole else [slots[0]] * self._width
        all_positions = [self._cache.capacity] * self._width
        for row, slot, position in zip(index, slots, positions, strict=True):
            all_slots[row], all_positions[row] = slot, position
        sent = upload([*all_slots, *all_positions, *index], self.slots.device, torch.long)
        self.slots.copy_(sent[: self._width])
        self.positions.copy_(sent[self._width : 2 * self._width])
        return sent[2 * self._width :]

    def rows(self) -> Rows:
        """Return the rows of the next pass."""
        cache = self._cache
        queries = self.positions.view(-1, 1, 1).expand(-1, -1, cache.queries_per_head)
        mask = causal_mask(queries, self._length, cache.keys.dtype)
        everything = slice(0, self._width)
        slots = everything if self._is_whole else self.slots
        group = Group(everything, slots, self._width, 1, self._length, mask)
        return Rows(self.slots, self.positions, (group,), self._order)

    def advance(self) -> None:
        """Move every position to the next row."""
        self.positions.add_(1).clamp_(max=self._cache.capacity)


class StaticStep(Protocol):
    """A step over tensors with fixed addresses."""

    def run(self) -> None: ...


S = TypeVar("S", bound=StaticStep)


class StepGraphs(Generic[S]):
    """The captured steps of one decoder, keyed by number of slots and bound on context length."""

    def __init__(self, cache: KVCache, name: str) -> None:
        self._cache = cache
        self._name = name
        self._steps: dict[tuple[int, int], tuple[S, Callable[[], None]]] = {}

    def capture(
        self,
        make: Callable[[int, int], S],
        check: Callable[[S, Callable[[], None], int, int], float],
        *,
        is_replayed: bool = True,
    ) -> None:
        """Make a step for every size. If `is_replayed`, capture the steps as CUDA graphs.

        `check(step, run, width, length)` returns the relative error of a step. Steps that cannot
        be captured, or whose results differ from those of the plain path, are left out; see
        `proof`. All slots must be empty.
        """
        pool: Any = None
        proofs = Proofs(f"CUDA graphs of the {self._name}")
        for size in self._sizes():
            step = make(*size)
            run = step.run

            def capture_and_check(step: S = step, size: tuple[int, int] = size) -> float:
                nonlocal pool, run
                captured = graph.Graph(step.run, pool)
                pool, run = captured.pool, captured.replay
                return check(step, run, *size)

            name = f"{size[0]} slots x {size[1]} rows"
            allowed = TOLERANCES[self._cache.keys.dtype]
            if not is_replayed or proofs.accepts(name, capture_and_check, allowed):
                self._steps[size] = (step, run)
                continue
            for slot in range(size[0]):  # a check that raised has left rows behind
                self._cache.reset(slot)
        proofs.report()

    def find(self, slots: Sequence[int], length: int) -> tuple[S, Callable[[], None]] | None:
        """Return the fastest step for these slots and for contexts of up to `length` rows.

        The slots must be ascending. Returns None if an ordinary pass, whose kernels are launched
        one by one, is faster.
        """
        count = len(slots)
        fitting = [size for size in self._steps if size[0] >= count and size[1] >= length]
        if not fitting:
            return None
        best = min(fitting, key=lambda size: self._replay_s(*size))
        launches = LAYER_LAUNCHES * len(self._cache.keys)
        eager_s = launches * LAUNCH_S + self._read_s(count * length, is_gathered=True)
        return self._steps[best] if self._replay_s(*best) <= eager_s else None

    def _replay_s(self, width: int, length: int) -> float:
        return self._read_s(width * length, is_gathered=width < self._cache.slot_count)

    def _read_s(self, rows: int, *, is_gathered: bool) -> float:
        """Estimate the seconds that reading this many rows of all layers takes."""
        read = rows * self._cache.layer_row_bytes * len(self._cache.keys)
        return read * (GATHER_COST if is_gathered else 1) / BYTES_PER_S

    def _sizes(self) -> Iterator[tuple[int, int]]:
        """Yield the sizes, largest first, so that smaller steps use the memory of larger ones."""
        for width in sorted(_doubles(1, self._cache.slot_count), reverse=True):
            for length in sorted(_doubles(SHORTEST, self._cache.capacity), reverse=True):
                yield width, length


def _doubles(first: int, last: int) -> set[int]:
    """Return `first`, `2 * first`, `4 * first` and so on up to `last`, and `last` itself."""
    found = {last}
    while first < last:
        found.add(first)
        first *= 2
    return found
