"""Attention of packed rows over the pages of their slots: each row sees the rows up to its own.

`attend` is the plain path. A kernel (`Kernel`) may replace it on a device on which both agree. Only
a kernel can be captured in a CUDA graph, because the calls of the plain path depend on the slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from duplane.worker.models.minicpm_o.llm.pages import PageTable

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
    """A call of the plain path, for one slot.

    - `rows`: the slot's packed rows.
    - `places`: the pool's rows of its context with the new rows. A slice needs no copy.
    - `mask` [query rows, length] is added to the scores: 0 for rows that a query row sees, else
      -inf. Without a mask each query row sees all rows.
    """

    rows: slice
    places: slice | Tensor
    mask: Tensor | None


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


def attend(queries: Tensor, keys: Tensor, values: Tensor, calls: Sequence[Call]) -> Tensor:
    """Attend slot by slot; shapes are those of `Kernel`.

    Query heads that share a key head become rows of one head.
    """
    shape = -1, len(keys), queries.shape[1] // len(keys), queries.shape[2]
    results: list[Tensor] = []
    for call in calls:
        own = queries[call.rows].reshape(shape).permute(1, 2, 0, 3)
        result = functional.scaled_dot_product_attention(
            own.flatten(1, 2)[None],
            keys[None, :, call.places],
            values[None, :, call.places],
            attn_mask=call.mask,
        )
        results.append(result.view(own.shape).permute(2, 0, 1, 3).flatten(1, 2))
    return results[0] if len(results) == 1 else torch.cat(results)


def causal_mask(positions: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Compute the mask [..., length] that is added to the scores of queries at `positions` [...].

    The mask is 0 for rows up to the query's own position, and -inf for later rows.
    """
    columns = torch.arange(length + -length % MASK_STRIDE, device=positions.device)
    mask = torch.zeros(*positions.shape, len(columns), device=positions.device, dtype=dtype)
    mask.masked_fill_(columns > positions.unsqueeze(-1), float("-inf"))
    return mask[..., :length]
