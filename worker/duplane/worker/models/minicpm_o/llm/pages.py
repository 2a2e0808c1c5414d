"""The pages of a KV cache: which rows of the pool belong to which slot.

A page is a number of neighbouring rows of the pool. The table of all slots is kept on the host, so
planning never waits for the device, and on the device, where kernels read it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from duplane.worker.models.minicpm_o.transfer import upload


class CacheFullError(Exception):
    """A slot has no room for the requested rows. Nothing was changed."""


class PageTable:
    """Gives pages of `page_rows` rows to slots of at most `capacity` rows.

    A slot always gets its `reserved` pages, a `share` of those of a whole context. It borrows
    further pages while some are `spare`. The pool has the pages of all reservations, and as many
    more as a slot needs for a whole context.

    The page after all others, the scratch page, belongs to no slot: passes of a fixed size write
    their padding rows to it. `table` [slots + 1, pages per slot] has the page numbers of all slots
    on the device; its entries without a page, and those of the last line, are the scratch page.
    """

    def __init__(
        self, slots: int, capacity: int, page_rows: int, device: torch.device, share: float = 1.0
    ) -> None:
        self.capacity, self.page_rows = capacity, page_rows
        self.per_slot = -(-capacity // page_rows)
        self.reserved = math.ceil(self.per_slot * share)
        self.scratch = (slots - 1) * self.reserved + self.per_slot
        self.free = set(range(self.scratch))
        self.held: list[list[int]] = [[] for _ in range(slots)]
        self.table = torch.full(
            (slots + 1, self.per_slot), self.scratch, dtype=torch.int32, device=device
        )

    @property
    def slot_rows(self) -> int:
        """The number of rows of the pages of a whole context."""
        return self.per_slot * self.page_rows

    @property
    def spare(self) -> int:
        """The number of free pages beyond those that slots lack of their reservations."""
        return len(self.free) - sum(max(0, self.reserved - len(held)) for held in self.held)

    def room(self, slot: int) -> int:
        """Return the number of rows of the longest context that the slot can have now."""
        pages = max(self.reserved, len(self.held[slot])) + self.spare
        return min(self.capacity, pages * self.page_rows)

    @property
    def row_count(self) -> int:
        """The number of rows of the pool, with those of the scratch page."""
        return (self.scratch + 1) * self.page_rows

    def take(self, wanted: Sequence[tuple[int, int]]) -> None:
        """Give each `(slot, rows)` the pages that it lacks for this number of rows.

        A slot has a place of its own in the pool, so that its pages are neighbours. If a page of
        this place is not free, the slot gets another one. If too few pages are spare, or if a slot
        cannot have so many rows, raises `CacheFullError` and changes nothing.
        """
        for slot, rows in wanted:
            if rows > self.capacity:
                raise CacheFullError(f"slot {slot} has {self.capacity} rows at most, not {rows}")
        counts = [(slot, -(-rows // self.page_rows)) for slot, rows in wanted]
        borrowed = sum(
            max(0, count - max(self.reserved, len(self.held[slot]))) for slot, count in counts
        )
        if borrowed and borrowed > self.spare:
            raise CacheFullError(f"{borrowed} pages of memory are needed, {self.spare} are spare")
        changes: list[tuple[int, int, int]] = []
        for slot, count in counts:
            pages = self.held[slot]
            for index in range(len(pages), count):
                own = slot * self.reserved + index
                page = own if own in self.free else min(self.free)
                self.free.remove(page)
                pages.append(page)
                changes.append((slot, index, page))
        if changes:
            slots, indices, pages = upload(changes, self.table.device, torch.long).unbind(1)
            self.table[slots, indices] = pages.int()

    def release(self, slot: int, kept: int = 0) -> None:
        """Make the pages of a slot after the first `kept` free. Their rows must be zero."""
        if dropped := self.held[slot][kept:]:
            self.table[slot, kept:].fill_(self.scratch)
            self.free.update(dropped)
            del self.held[slot][kept:]

    def ranges(self, slot: int, start: int, stop: int) -> list[range]:
        """Return the pool's rows of the slot's rows from `start` to `stop`."""
        runs: list[range] = []
        while start < stop:
            page, skipped = divmod(start, self.page_rows)
            count = min(stop - start, self.page_rows - skipped)
            begin = self.held[slot][page] * self.page_rows + skipped
            run = range(begin, begin + count)
            if runs and runs[-1].stop == begin:  # neighbours are in one range
                run = range(runs.pop().start, run.stop)
            runs.append(run)
            start += count
        return runs

    def rows_at(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Return the pool's row of each of these `positions` [rows] of `slots` [rows]."""
        pages = self.table[slots, positions // self.page_rows]
        return pages * self.page_rows + positions % self.page_rows
