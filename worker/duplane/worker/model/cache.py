"""The slotted KV cache: allocated once, one stretch of rows per slot, reset and never freed.

Decides which rows a forward pass writes and sees; knows nothing about what computes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

MOVED_ROWS = 256
"""Rows that are moved at once: what bounds the memory that a move takes."""


class CacheFullError(Exception):
    """A slot has no room for the rows asked for; nothing was changed."""


@dataclass(frozen=True)
class Run:
    """Neighbouring slots that each add the same number of rows: one attention call.

    `first_row` is where they begin among the packed rows, `length` the longest context among
    them (new rows included), `mask` [slots, 1, query rows, length] what each query row sees
    (None: everything).
    """

    first_row: int
    first_slot: int
    slot_count: int
    rows_per_slot: int
    length: int
    mask: Tensor | None


@dataclass(frozen=True)
class Rows:
    """The packed rows of one forward pass, slot after slot.

    `slots` and `positions` [rows] say where each row goes, `runs` how they attend, `last`
    [slots] which row is each slot's last one.
    """

    slots: Tensor
    positions: Tensor
    runs: tuple[Run, ...]
    last: Tensor


class KVCache:
    """Keys (rotated) and values of all layers, `[layers, slots, heads, capacity, head_dim]`.

    A row's position is its index in the cache. Lengths are kept on the host, so planning a pass
    never waits for the device.
    """

    def __init__(
        self,
        *,
        layers: int,
        slots: int,
        heads: int,
        queries_per_head: int,
        capacity: int,
        head_dim: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        shape = (layers, slots, heads, capacity, head_dim)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.slot_count, self.capacity = slots, capacity
        self._queries_per_head = queries_per_head
        self._lengths = [0] * slots
        self._touched = [0] * slots

    @property
    def memory_bytes(self) -> int:
        """The size of the two tensors."""
        return self.keys.nbytes + self.values.nbytes

    def length(self, slot: int) -> int:
        """How many rows the slot holds."""
        return self._lengths[slot]

    def extend(self, counts: Sequence[tuple[int, int]]) -> Rows:
        """Make room for `(slot, number of rows)` each, slots ascending, and plan the pass.

        Raises `CacheFullError`, with nothing changed, if one of them has no room.
        """
        if any(here[0] >= after[0] for here, after in pairwise(counts)):
            raise ValueError(f"slots are not ascending: {[slot for slot, _ in counts]}")
        for slot, count in counts:
            if self._lengths[slot] + count > self.capacity:
                raise CacheFullError(
                    f"slot {slot} holds {self._lengths[slot]} of {self.capacity} rows,"
                    f" {count} more do not fit"
                )
        placed = self._place(counts)
        for slot, count in counts:
            self._lengths[slot] += count
            self._touched[slot] = max(self._touched[slot], self._lengths[slot])
        positions = placed[1]
        ends = torch.tensor([count for _, count in counts]).cumsum(0) - 1
        runs = self._runs(counts, positions)
        return Rows(placed[0], positions, runs, ends.to(self.keys.device, non_blocking=True))

    def _place(self, counts: Sequence[tuple[int, int]]) -> Tensor:
        """Slot and position of every row, [2, rows], in one transfer."""
        slots: list[int] = []
        positions: list[int] = []
        for slot, count in counts:
            slots.extend([slot] * count)
            positions.extend(range(self._lengths[slot], self._lengths[slot] + count))
        return torch.tensor([slots, positions]).to(self.keys.device, non_blocking=True)

    def _runs(self, counts: Sequence[tuple[int, int]], positions: Tensor) -> tuple[Run, ...]:
        runs: list[Run] = []
        start = row = 0
        while start < len(counts):
            first, count = counts[start]
            stop = start + 1
            while stop < len(counts) and counts[stop] == (first + stop - start, count):
                stop += 1
            lengths = [self._lengths[slot] for slot, _ in counts[start:stop]]
            longest, total = max(lengths), count * (stop - start)
            mask = None
            if count > 1 or min(lengths) < longest:
                places = positions[row : row + total].view(stop - start, 1, count)
                places = places.repeat(1, 1, self._queries_per_head).unsqueeze(-1)
                mask = torch.arange(longest, device=places.device) <= places
            runs.append(Run(row, first, stop - start, count, longest, mask))
            start, row = stop, row + total
        return tuple(runs)

    def write(self, layer: int, rows: Rows, keys: Tensor, values: Tensor) -> None:
        """Store the keys and values `[rows, heads, head_dim]` of one layer."""
        self.keys[layer][rows.slots, :, rows.positions] = keys
        self.values[layer][rows.slots, :, rows.positions] = values

    def view(self, layer: int, run: Run) -> tuple[Tensor, Tensor]:
        """Keys and values a run attends to, `[slots, heads, length, head_dim]`, without a copy."""
        slots = slice(run.first_slot, run.first_slot + run.slot_count)
        return (
            self.keys[layer, slots, :, : run.length],
            self.values[layer, slots, :, : run.length],
        )

    def move(
        self, slot: int, source: int, target: int, turn: Callable[[Tensor, int, int], Tensor]
    ) -> None:
        """Move the rows from `source` on so that they begin at `target`, in place.

        `turn(keys, source, target)` gives keys `[layers, heads, rows, head_dim]` that were at the
        position `source` and after as they are at `target` and after; values are the same
        everywhere. Raises `CacheFullError`, with nothing changed, if they do not fit.
        """
        count = self._lengths[slot] - source
        if source < 0 or count < 0 or target < 0:
            raise ValueError(f"slot {slot}: no rows to move from {source} to {target}")
        if target + count > self.capacity:
            raise CacheFullError(f"slot {slot}: {count} rows do not fit behind {target}")
        starts = range(0, count, MOVED_ROWS)
        # What is overwritten must have been moved before.
        for start in starts if target < source else reversed(starts):
            rows = min(MOVED_ROWS, count - start)
            old = slice(source + start, source + start + rows)
            new = slice(target + start, target + start + rows)
            self.keys[:, slot, :, new] = turn(self.keys[:, slot, :, old], old.start, new.start)
            self.values[:, slot, :, new] = self.values[:, slot, :, old].clone()
        self._lengths[slot] = target + count
        self._touched[slot] = max(self._touched[slot], target + count)

    def restore(self, slot: int, length: int) -> None:
        """Count rows again that lie behind a `truncate`, up to `length`."""
        if not self._lengths[slot] <= length <= self._touched[slot]:
            raise ValueError(f"slot {slot} has no {length} rows to restore")
        self._lengths[slot] = length

    def truncate(self, slot: int, length: int) -> None:
        """Forget the rows from `length` on; they are zeroed by `reset`, at the latest."""
        if not 0 <= length <= self._lengths[slot]:
            raise ValueError(f"slot {slot} holds {self._lengths[slot]} rows, not {length}")
        self._lengths[slot] = length

    def rewind(self, slot: int, length: int) -> None:
        """Count as many rows as before a pass that failed: what it wrote is behind them."""
        if not 0 <= length <= self._touched[slot]:
            raise ValueError(f"slot {slot} never had {length} rows")
        self._lengths[slot] = length

    def reset(self, slot: int) -> None:
        """Forget the slot's rows and zero all that was ever written since the last reset."""
        touched = self._touched[slot]
        self.keys[:, slot, :, :touched].zero_()
        self.values[:, slot, :, :touched].zero_()
        self._lengths[slot] = self._touched[slot] = 0

    def is_clean(self, slot: int) -> bool:
        """Verify that the slot is empty and all of its memory zero."""
        if self._lengths[slot] or self._touched[slot]:
            return False
        dirty = self.keys[:, slot].any() | self.values[:, slot].any()
        return not bool(dirty.item())
