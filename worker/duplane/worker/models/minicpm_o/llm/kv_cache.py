"""The paged KV cache. Its pool is allocated once; slots take pages of it, and `reset` frees them.

Lengths and pages are kept on the host, so planning a pass never waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

import torch
from torch import Tensor

from duplane.worker.models.minicpm_o.llm.attention import (
    TILE,
    Call,
    Kernel,
    Rows,
    Tiles,
    attend,
    causal_mask,
    plan_tiles,
)
from duplane.worker.models.minicpm_o.llm.pages import PageTable
from duplane.worker.models.minicpm_o.transfer import upload

PAGE_ROWS = 256
"""Number of rows of a page: a power of two, and at least 16, which kernels require."""
MOVED_ROWS = 256
"""Maximum number of rows that are moved in one step, which bounds the memory that a move needs."""


@dataclass(frozen=True)
class Slide:
    """One change of a context: the rows from `kept` on move to `target`.

    Then `ids` are fed into the rows from `start` to `target`. Without `ids`, `start` is `target`.
    """

    kept: int
    target: int
    start: int
    ids: tuple[int, ...] = ()


class KVCache:
    """Keys (rotated) and values of all layers, `[layers, heads, rows of the pool, head_dim]`.

    A context has at most `capacity` rows, and room for a `share` of them at any time. The position
    of a row is its index in the context, and `pages` has its place in the pool. With a `kernel`,
    rows attend by it.
    """

    def __init__(  # noqa: PLR0913 - each is a dimension, and named
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
        share: float = 1.0,
    ) -> None:
        self.pages = PageTable(slots, capacity, PAGE_ROWS, device, share)
        shape = (layers, heads, self.pages.row_count, head_dim)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.slot_count = slots
        self.capacity = capacity
        self.queries_per_head = queries_per_head
        self.tile_rows = max(1, TILE // queries_per_head)
        self.kernel: Kernel | None = None
        self._lengths = [0] * slots
        self._touched = [0] * slots

    @property
    def memory_bytes(self) -> int:
        """The size of keys, values and the table of pages."""
        return self.keys.nbytes + self.values.nbytes + self.pages.table.nbytes

    def length(self, slot: int) -> int:
        """Return the number of rows that the slot holds."""
        return self._lengths[slot]

    def room(self, slot: int) -> int:
        """Return the number of rows of the longest context that the slot can hold now."""
        return self.pages.room(slot)

    def hold(self, slot: int, length: int) -> None:
        """Take the pages of a context of `length` rows, so that these rows will have room.

        Raises `CacheFullError` and changes nothing if this is more than `room`.
        """
        self.pages.take([(slot, length)])

    def extend(self, counts: Sequence[tuple[int, int]]) -> Rows:
        """Add `(slot, number of rows)` to the lengths, slots ascending, and plan the pass.

        If one of the slots has no room, raises `CacheFullError` and changes nothing.
        """
        self.grow(counts)
        stops = [self._lengths[slot] for slot, _ in counts]
        spans = [
            (slot, stop - count, stop) for stop, (slot, count) in zip(stops, counts, strict=True)
        ]
        positions = list(chain.from_iterable(range(*span[1:]) for span in spans))
        last = [stop - 1 for stop in accumulate(count for _, count in counts)]
        ranges = [found for span in spans for found in self.pages.ranges(*span)]
        # All indices are uploaded in one transfer.
        places = [] if len(ranges) == 1 else list(chain.from_iterable(ranges))
        tiles = plan_tiles(counts, self.tile_rows) if self.kernel else []
        lists = [positions, last, places, list(chain.from_iterable(tiles))]
        sent = upload(list(chain.from_iterable(lists)), self.keys.device, torch.long)
        at, ends, where, numbers = sent.split_with_sizes([len(numbers) for numbers in lists])
        if self.kernel:
            plan = Tiles(numbers.view(-1, 3), max(stops))
        else:
            plan = [
                self._call(slot, slice(end - count + 1, end + 1), at)
                for (slot, count), end in zip(counts, last, strict=True)
            ]
        return Rows(at, where if places else _slice(ranges[0]), ends, plan)

    def _call(self, slot: int, rows: slice, positions: Tensor) -> Call:
        """Return the call for the packed rows of a slot, whose length includes them."""
        length, mask = self._lengths[slot], None
        if rows.stop - rows.start > 1:
            queries = positions[rows].repeat(self.queries_per_head)
            mask = causal_mask(queries, length, self.keys.dtype)
        return Call(rows, self._places(slot, 0, length), mask)

    def grow(self, counts: Sequence[tuple[int, int]]) -> None:
        """Add `(slot, number of rows)` to the lengths, slots ascending.

        If one of the slots has no room, raises `CacheFullError` and changes nothing.
        """
        if any(here[0] >= after[0] for here, after in pairwise(counts)):
            raise ValueError(f"slots are not ascending: {[slot for slot, _ in counts]}")
        self._set_lengths([(slot, self._lengths[slot] + count) for slot, count in counts])

    def _set_lengths(self, lengths: Sequence[tuple[int, int]]) -> None:
        """Set the `(slot, length)` of slots; take the pages that they lack."""
        self.pages.take(lengths)
        for slot, length in lengths:
            self._lengths[slot] = length
            self._touched[slot] = max(self._touched[slot], length)

    def write(self, layer: int, rows: Rows, keys: Tensor, values: Tensor) -> None:
        """Store the keys and values `[rows, heads, head_dim]` of one layer."""
        self.keys[layer][:, rows.places] = keys.transpose(0, 1)
        self.values[layer][:, rows.places] = values.transpose(0, 1)

    def attend(self, layer: int, rows: Rows, queries: Tensor) -> Tensor:
        """Attend with queries `[rows, query heads, head_dim]`; returns such results.

        A row sees the rows of its slot up to its own, which `write` has stored before.
        """
        keys, values = self.keys[layer], self.values[layer]
        if isinstance(rows.plan, Tiles):
            assert self.kernel is not None
            return self.kernel(queries, keys, values, self.pages, rows.positions, rows.plan)
        return attend(queries, keys, values, rows.plan)

    def read(self, slot: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a context, `[layers, heads, length, head_dim]`."""
        places = self._places(slot, 0, self._lengths[slot])
        return self.keys[:, :, places], self.values[:, :, places]

    def _places(self, slot: int, start: int, stop: int) -> slice | Tensor:
        """Return the pool's rows of a part of a context: as a slice, if they are neighbours."""
        ranges = self.pages.ranges(slot, start, stop)
        if len(ranges) == 1:
            return _slice(ranges[0])
        return upload(list(chain.from_iterable(ranges)), self.keys.device, torch.long)

    def move(
        self, slot: int, source: int, target: int, rotate: Callable[[Tensor, int, int], Tensor]
    ) -> None:
        """Move the rows from `source` on so that they begin at `target`, in place.

        `rotate(keys, source, target)` rotates keys `[layers, heads, rows, head_dim]` from the
        positions at `source` on to the positions at `target` on. Values do not depend on positions.
        Borrowed pages without rows are given back. If the rows do not fit, raises `CacheFullError`
        and changes nothing.
        """
        count = self._lengths[slot] - source
        length = target + count
        if source < 0 or count < 0 or target < 0:
            raise ValueError(f"slot {slot}: no rows to move from {source} to {target}")
        self.pages.take([(slot, length)])
        starts = range(0, count, MOVED_ROWS)
        # The order of the parts makes sure that every row is moved before it is overwritten.
        for start in starts if target < source else reversed(starts):
            rows = min(MOVED_ROWS, count - start)
            old = self._places(slot, source + start, source + start + rows)
            new = self._places(slot, target + start, target + start + rows)
            turned = rotate(self.keys[:, :, old], source + start, target + start)
            self.keys[:, :, new] = turned
            self.values[:, :, new] = self.values[:, :, old].clone()
        self._set_lengths([(slot, length)])
        self._give_back(slot, max(self.pages.reserved, -(-length // self.pages.page_rows)))

    def truncate(self, slot: int, length: int) -> None:
        """Drop the rows from `length` on. The next rows overwrite them, or `reset` zeroes them.

        Until then `rewind` can restore them.
        """
        if not 0 <= length <= self._lengths[slot]:
            raise ValueError(f"slot {slot} holds {self._lengths[slot]} rows, not {length}")
        self._lengths[slot] = length

    def rewind(self, slot: int, length: int) -> None:
        """Set the length back to one that it had before, with the rows that it had then."""
        if not 0 <= length <= self._touched[slot]:
            raise ValueError(f"slot {slot} never had {length} rows")
        self._lengths[slot] = length

    def reset(self, slot: int) -> None:
        """Drop the slot's rows, zero its pages, and free them."""
        self._give_back(slot, 0)
        self._lengths[slot] = 0

    def _give_back(self, slot: int, kept: int) -> None:
        """Zero and free the pages of a slot after the first `kept`, if there are any."""
        size, held = self.pages.page_rows, len(self.pages.held[slot])
        for places in map(_slice, self.pages.ranges(slot, kept * size, held * size)):
            self.keys[:, :, places].zero_()
            self.values[:, :, places].zero_()
        self.pages.release(slot, kept)
        self._touched[slot] = min(self._touched[slot], kept * size)

    def is_clean(self, slot: int) -> bool:
        """True if the slot holds no page. All pages that no slot holds are zero."""
        return not self.pages.held[slot]


def _slice(rows: range) -> slice:
    return slice(rows.start, rows.stop)
