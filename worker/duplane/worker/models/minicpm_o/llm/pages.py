"""The pages of a KV cache: which rows of the pool belong to which slot.

A page is a number of neighbouring rows of the pool. The table of all slots is kept on the host, so
planning never waits for the device, and on the device, where kernels read it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from duplane.worker.models.minicpm_o.transfer import upload


class PageTable:
    """Gives pages of `page_rows` rows to slots of at most `capacity` rows.

    The page after all others, the scratch page, belongs to no slot: passes of a fixed size write
    their padding rows to it. `table` [slots + 1, pages per slot] has the page numbers of all slots
    on the device; its entries without a page, and those of the last line, are the scratch page.
    """

    def __init__(self, slots: int, capacity: int, page_rows: int, device: torch.device) -> None:
        self.page_rows = page_rows
        self.per_slot = -(-capacity // page_rows)
        self.scratch = slots * self.per_slot
        self.free = set(range(self.scratch))
        self.held: list[list[int]] = [[] for _ in range(slots)]
        self.table = torch.full(
            (slots + 1, self.per_slot), self.scratch, dtype=torch.int32, device=device
        )
        self._borrowed = [0] * slots
        self._are_neighbours = [True] * slots

    @property
    def slot_rows(self) -> int:
        """The number of rows of the own pages of a slot."""
        return self.per_slot * self.page_rows

    @property
    def row_count(self) -> int:
        """The number of rows of the pool, with those of the scratch page."""
        return (self.scratch + 1) * self.page_rows

    def take(self, wanted: Sequence[tuple[int, int]]) -> None:
        """Give each `(slot, rows)` the pages that it lacks for this number of rows.

        Each slot has its own pages, which are neighbours. If one of them is not free, the slot
        borrows another one.
        """
        changes: list[tuple[int, int, int]] = []
        for slot, rows in wanted:
            pages = self.held[slot]
            for index in range(len(pages), -(-rows // self.page_rows)):
                own = slot * self.per_slot + index
                page = own if own in self.free else min(self.free)
                self._borrowed[slot] += page != own
                self.free.remove(page)
                pages.append(page)
                changes.append((slot, index, page))
            self._are_neighbours[slot] = len(self._runs(pages)) <= 1
        if changes:
            slots, indices, pages = upload(changes, self.table.device, torch.long).unbind(1)
            self.table[slots, indices] = pages.int()

    def release(self, slot: int) -> None:
        """Make all pages of a slot free. Their rows must be zero."""
        if self.held[slot]:
            self.table[slot].fill_(self.scratch)
            self.free.update(self.held[slot])
            self.held[slot].clear()
            self._borrowed[slot] = 0
            self._are_neighbours[slot] = True

    @property
    def are_own(self) -> bool:
        """Whether no slot has borrowed a page, so that contexts begin at equal distances."""
        return not any(self._borrowed)

    def first_row(self, slot: int) -> int | None:
        """Return the pool's row of the slot's first row; None if its pages are not neighbours."""
        return self.held[slot][0] * self.page_rows if self._are_neighbours[slot] else None

    def ranges(self, slot: int, start: int, stop: int) -> list[range]:
        """Return the pool's rows of the slot's rows from `start` to `stop`."""
        first = start // self.page_rows
        held = self._runs(self.held[slot][first : -(-stop // self.page_rows)])
        skipped = start - first * self.page_rows
        if held:
            held[0] = held[0][skipped:]
            held[-1] = held[-1][: len(held[-1]) - -stop % self.page_rows]
        return [run for run in held if run]

    def _runs(self, pages: Sequence[int]) -> list[range]:
        """Return the pool's rows of these pages, with neighbours in one range."""
        runs: list[range] = []
        for page in pages:
            start, stop = page * self.page_rows, (page + 1) * self.page_rows
            if runs and runs[-1].stop == start:
                runs[-1] = range(runs[-1].start, stop)
            else:
                runs.append(range(start, stop))
        return runs

    def rows_at(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Return the pool's row of each of these `positions` [rows] of `slots` [rows]."""
        pages = self.table[slots, positions // self.page_rows]
        return pages * self.page_rows + positions % self.page_rows
