"""Attention of packed rows over the pages of their slots: each row sees the rows up to its own.

`attend` is the plain path. A kernel (`Kernel`) may replace it on a device on which both agree. Only
a kernel can be captured in a CUDA graph, because the calls of the plain path depend on the slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from duplane.worker.models.minicpm_o.llm.pages import PageTable
from duplane.worker.models.minicpm_o.transfer import upload

TILE = 32
"""Number of rows of a tile of the kernel. The query heads of one key head are rows of one tile."""
MASK_STRIDE = 16
"""The rows of a mask begin at multiples of this many columns, as attention kernels require."""


@dataclass(frozen=True)
class Tiles:
    """How rows attend in a kernel: tiles of some neighbouring packed rows of one slot.

    - `numbers`, int64 [tiles, 3]: the slot, the first packed row and the number of rows.
    - `longest`: the largest number of rows that any row sees.
    """

    numbers: Tensor
    longest: int


@dataclass(frozen=True)
class Call:
    """A call of the plain path: slots with as many packed rows each, slot after slot.

    - `rows`: the packed rows of these slots.
    - `first`: the pool's row of the first slot's first row, and `distance` the number of pool rows
      from each slot's first row to that of the next. If the pages of a slot are no neighbours, this
      slot has a call of its own, and `places` [length] has the pool's rows of its context.
    - `length`: the number of rows of the longest context, with the new rows.
    - `mask` [slots, 1, query rows, length] is added to the scores: 0 for rows that a query row
      sees, else -inf. Without a mask each query row sees all rows.
    """

    rows: slice
    slot_count: int
    first: int
    distance: int
    places: Tensor | None
    length: int
    mask: Tensor | None

    def context(self, pool: Tensor) -> Tensor:
        """Return contexts [slots, heads, length, head_dim] in a pool [heads, rows, head_dim]."""
        if self.places is not None:
            return pool.index_select(1, self.places).unsqueeze(0)
        heads, _, width = pool.shape
        shape = self.slot_count, heads, self.length, width
        strides = self.distance * width, pool.stride(0), width, 1
        return pool.as_strided(shape, strides, pool.storage_offset() + self.first * width)


@dataclass(frozen=True)
class Rows:
    """The packed rows of one forward pass, slot after slot.

    - `positions` [rows]: the number of rows before each row in its slot.
    - `places` [rows]: the pool's row of each row.
    - `last` [slots]: the index of each slot's last row.
    - `plan`: how the rows attend.
    """

    positions: Tensor
    places: slice | Tensor
    last: Tensor
    plan: Tiles | Sequence[Call]


Kernel: TypeAlias = Callable[[Tensor, Tensor, Tensor, PageTable, Tensor, Tiles], Tensor]
"""Maps queries [rows, heads, head_dim], keys and values of one layer [key heads, rows of the pool,
head_dim], pages, positions [rows] and tiles to results like the queries, but contiguous."""


def plan_tiles(counts: Sequence[tuple[int, int]], most: int) -> list[tuple[int, int, int]]:
    """Return the `numbers` of tiles of at most `most` packed rows; `counts` are `(slot, rows)`."""
    tiles: list[tuple[int, int, int]] = []
    first = 0
    for slot, count in counts:
        starts = range(0, count, most)
        tiles += [(slot, first + start, min(most, count - start)) for start in starts]
        first += count
    return tiles


def plan_calls(
    counts: Sequence[tuple[int, int]],
    lengths: Sequence[int],
    pages: PageTable,
    positions: Tensor,
    queries_per_head: int,
    dtype: torch.dtype,
) -> tuple[Call, ...]:
    """Plan the calls for packed rows at `positions`; `counts` are `(slot, rows)`.

    `lengths` are those of the slots' contexts with the new rows; `dtype` is that of the masks.
    Neighbouring entries of `counts` with as many rows have one call if their slots have equal
    distances and all slots are in their own places: then their contexts can be read without a copy.
    """
    groups: list[list[int]] = []
    for index in range(len(counts)):
        if groups and pages.are_own and _are_alike([*groups[-1], index], counts):
            groups[-1].append(index)
        else:
            groups.append([index])
    calls: list[Call] = []
    stop = 0
    for group in groups:
        (slot, most), own = counts[group[0]], [lengths[index] for index in group]
        rows = slice(stop, stop := stop + most * len(group))
        first, longest = pages.first_row(slot), max(own)
        places = mask = None
        if first is None:
            ranges = pages.ranges(slot, 0, longest)
            places = upload(list(chain.from_iterable(ranges)), positions.device, torch.long)
        if most > 1 or min(own) < longest:
            queries = positions[rows].view(len(group), 1, most).repeat(1, 1, queries_per_head)
            mask = causal_mask(queries, longest, dtype)
        apart = (counts[group[-1]][0] - slot) // max(1, len(group) - 1)
        distance = apart * pages.reserved * pages.page_rows
        calls.append(Call(rows, len(group), first or 0, distance, places, longest, mask))
    return tuple(calls)


def _are_alike(group: Sequence[int], counts: Sequence[tuple[int, int]]) -> bool:
    """Whether these entries have as many rows each, and slots at equal distances."""
    slots = [counts[index][0] for index in group]
    is_as_many = counts[group[0]][1] == counts[group[-1]][1]
    return is_as_many and slots[1] - slots[0] == slots[-1] - slots[-2]


def attend(queries: Tensor, keys: Tensor, values: Tensor, calls: Sequence[Call]) -> Tensor:
    """Attend call by call; shapes are those of `Kernel`.

    Query heads that share a key head become rows of one head.
    """
    results: list[Tensor] = []
    for call in calls:
        shape = call.slot_count, -1, len(keys), queries.shape[1] // len(keys), queries.shape[2]
        own = queries[call.rows].reshape(shape).permute(0, 2, 3, 1, 4)
        result = functional.scaled_dot_product_attention(
            own.flatten(2, 3), call.context(keys), call.context(values), attn_mask=call.mask
        )
        result = result.view(own.shape).permute(0, 3, 1, 2, 4)
        results.append(result.reshape(-1, *queries.shape[1:]))
    return results[0] if len(results) == 1 else torch.cat(results)


def causal_mask(positions: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Compute the mask [..., length] that is added to the scores of queries at `positions` [...].

    The mask is 0 for rows up to the query's own position, and -inf for later rows.
    """
    columns = torch.arange(length + -length % MASK_STRIDE, device=positions.device)
    mask = torch.zeros(*positions.shape, len(columns), device=positions.device, dtype=dtype)
    mask.masked_fill_(columns > positions.unsqueeze(-1), float("-inf"))
    return mask[..., :length]
