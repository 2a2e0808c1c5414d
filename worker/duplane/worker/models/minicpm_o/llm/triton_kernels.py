"""The Triton kernels of a decoder layer; `attention` and `operations` have the plain forms.

The bits of a row never depend on the other rows of a pass, nor on its slot or its pages.

Attention is two kernels. A program of the first one computes one tile, for one key head and one
split of the context: the query heads of this key head, of some rows of one slot. Splits begin at
fixed positions of a context, and a row has as many splits as its own length needs. The second
kernel combines the splits of a row in their order. The way to tile rows and to split contexts
follows the unified attention kernel of vLLM (https://github.com/vllm-project/vllm, Apache License
2.0).

Import this module only on CUDA.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from duplane.worker.models.minicpm_o.attention.triton_language import constexpr, jit, tensor, tl
from duplane.worker.models.minicpm_o.llm.attention import TILE, Tiles
from duplane.worker.models.minicpm_o.llm.pages import PageTable

SPLIT = 1024
"""Number of rows of a context that one program reads."""
BLOCK_BYTES = 128
"""Number of rows that a program reads at once, times the bytes of a number; at most a page."""
SILU_BLOCK = 1024
"""Number of columns of `silu_times_up` that one program computes."""

# The addresses of slices of one upload are not aligned alike; that must not compile a kernel anew.
sliced = jit(do_not_specialize_on_alignment=["positions", "tiles", "places"])


@sliced
def attend_split(  # noqa: PLR0913 - a kernel has no objects
    queries: tensor,
    keys: tensor,
    values: tensor,
    table: tensor,
    positions: tensor,
    tiles: tensor,
    sums: tensor,
    maxima: tensor,
    totals: tensor,
    scale: tensor,
    query_stride: constexpr,
    head_stride: constexpr,
    heads: constexpr,
    group: constexpr,
    width: constexpr,
    wide: constexpr,
    page_rows: constexpr,
    pages_per_slot: constexpr,
    splits: constexpr,
    split: constexpr,
    block: constexpr,
    tile: constexpr,
) -> None:
    """Compute `sums` [rows, heads, splits, width], the weighted values, of a tile and a split.

    `maxima` and `totals` [rows, heads, splits] are the largest score, in base 2, and the sum of the
    weights. `wide` is `width` rounded up to a power of two. `query_stride` and `head_stride` are
    the distances of two rows of queries, and of two heads of keys and values.
    """
    numbers = tiles + tl.program_id(0) * 3
    slot, first, count = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2)
    key_head = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    start = part * split
    last = positions + first + count - 1
    longest = tl.load(last, mask=count > 0, other=-1).to(tl.int32) + 1
    if start < longest:
        line = tl.arange(0, tile)
        column = tl.arange(0, wide)
        is_column = (column < width)[None, :]
        is_line = line < count * group
        row = first + line // group
        head = key_head * group + line % group
        length = tl.load(positions + row, mask=is_line, other=-1).to(tl.int32) + 1
        query = tl.load(
            queries + (row * query_stride + head * width)[:, None] + column[None, :],
            mask=is_line[:, None] & is_column,
            other=0.0,
        )
        largest = tl.full([tile], float("-inf"), tl.float32)
        total = tl.zeros([tile], tl.float32)
        weighted = tl.zeros([tile, wide], tl.float32)
        for begin in range(start, tl.minimum(start + split, longest), block):
            page = tl.load(table + slot * pages_per_slot + begin // page_rows).to(tl.int64)
            position = begin + tl.arange(0, block)
            place = page * page_rows + position % page_rows
            is_held = (position < longest)[:, None] & is_column
            at = key_head * head_stride + place[:, None] * width + column[None, :]
            key = tl.load(keys + at, mask=is_held, other=0.0)
            value = tl.load(values + at, mask=is_held, other=0.0)
            scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
            is_seen = position[None, :] < length[:, None]
            scores = tl.where(is_seen, scores, float("-inf"))
            larger = tl.maximum(largest, tl.max(scores, 1))
            # A row that has seen nothing has no largest score; with 0 its weights are 0, not NaN.
            base = tl.where(larger == float("-inf"), 0.0, larger)
            weights = tl.exp2(scores - base[:, None])
            kept = tl.exp2(largest - base)
            total = total * kept + tl.sum(weights, 1)
            added = tl.dot(weights.to(value.dtype), value, input_precision="ieee")
            weighted = weighted * kept[:, None] + added
            largest = larger
        is_written = is_line & (start < length)
        at_split = (row * heads + head) * splits + part
        tl.store(maxima + at_split, largest, mask=is_written)
        tl.store(totals + at_split, total, mask=is_written)
        at_sum = at_split[:, None] * width + column[None, :]
        tl.store(sums + at_sum, weighted, mask=is_written[:, None] & is_column)


@sliced
def combine_splits(  # noqa: PLR0913 - a kernel has no objects
    positions: tensor,
    sums: tensor,
    maxima: tensor,
    totals: tensor,
    results: tensor,
    heads: constexpr,
    width: constexpr,
    wide: constexpr,
    splits: constexpr,
    split: constexpr,
) -> None:
    """Combine the splits of one row and head to `results` [rows, heads, width]."""
    row = tl.program_id(0).to(tl.int64)
    of_head = row * heads + tl.program_id(1)
    column = tl.arange(0, wide)
    is_column = column < width
    at = of_head * splits
    largest, total = tl.load(maxima + at), tl.load(totals + at)
    combined = tl.load(sums + at * width + column, mask=is_column, other=0.0)
    count = (tl.load(positions + row).to(tl.int32) + split) // split
    for part in range(1, count):
        own = tl.load(maxima + at + part)
        larger = tl.maximum(largest, own)
        kept, weight = tl.exp2(largest - larger), tl.exp2(own - larger)
        added = tl.load(sums + (at + part) * width + column, mask=is_column, other=0.0)
        combined = combined * kept + added * weight
        total = total * kept + tl.load(totals + at + part) * weight
        largest = larger
    result = (combined / total).to(results.dtype.element_ty)
    tl.store(results + of_head * width + column, result, mask=is_column)


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    pages: PageTable,
    positions: Tensor,
    tiles: Tiles,
    split: int = SPLIT,
) -> Tensor:
    """Attend as `attention.Kernel` describes, in splits of `split` rows."""
    (rows, heads, width), key_heads = queries.shape, len(keys)
    splits = -(-pages.slot_rows // split)
    sums = torch.empty(rows, heads, splits, width, device=queries.device)
    maxima, totals = torch.empty(2, rows, heads, splits, device=queries.device).unbind()
    results = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    sizes = {
        "heads": heads,
        "width": width,
        "wide": max(16, 1 << (width - 1).bit_length()),
        "splits": splits,
        "split": split,
    }
    attend_split[len(tiles.numbers), key_heads, -(-tiles.longest // split)](
        queries,
        keys,
        values,
        pages.table,
        positions,
        tiles.numbers,
        sums,
        maxima,
        totals,
        width**-0.5 * math.log2(math.e),
        query_stride=queries.stride(0),
        head_stride=keys.stride(0),
        group=heads // key_heads,
        page_rows=pages.page_rows,
        pages_per_slot=pages.per_slot,
        block=min(BLOCK_BYTES // keys.element_size(), pages.page_rows),
        tile=max(TILE, 1 << (heads // key_heads - 1).bit_length()),
        **sizes,
    )
    combine_splits[rows, heads](positions, sums, maxima, totals, results, **sizes)
    return results


@sliced
def place_head(  # noqa: PLR0913 - a kernel has no objects
    heads: tensor,
    query_weights: tensor,
    key_weights: tensor,
    cosines: tensor,
    sines: tensor,
    places: tensor,
    queries: tensor,
    keys: tensor,
    values: tensor,
    epsilon: tensor,
    head_stride: constexpr,
    query_heads: constexpr,
    key_heads: constexpr,
    width: constexpr,
    wide: constexpr,
    has_norm: constexpr,
) -> None:
    """Compute one head of one row of `heads` [rows, query heads + 2 * key heads, width].

    Queries go to `queries` [rows, query heads, width], keys and values to the place of the row in
    `keys` and `values`, whose heads are `head_stride` apart. `wide` is `width` rounded up to a
    power of two.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    column = tl.arange(0, wide)
    is_column = column < width
    other = (column + width // 2) % width
    source = heads + (row * (query_heads + 2 * key_heads) + head) * width
    states = tl.load(source + column, mask=is_column, other=0.0)
    if head < query_heads + key_heads:
        exact = states.to(tl.float32)
        turned = tl.load(source + other, mask=is_column, other=0.0).to(tl.float32)
        if has_norm:
            scale = 1.0 / tl.sqrt(tl.sum(exact * exact, 0) / width + epsilon)
            is_query = head < query_heads
            of_query, of_key = is_column & is_query, is_column & (head >= query_heads)
            weight = tl.load(query_weights + column, mask=of_query, other=0.0).to(tl.float32)
            weight += tl.load(key_weights + column, mask=of_key, other=0.0).to(tl.float32)
            paired = tl.load(query_weights + other, mask=of_query, other=0.0).to(tl.float32)
            paired += tl.load(key_weights + other, mask=of_key, other=0.0).to(tl.float32)
            # torch rounds between the norm and the rotation.
            exact = (exact * scale * weight).to(states.dtype).to(tl.float32)
            turned = (turned * scale * paired).to(states.dtype).to(tl.float32)
        cosine = tl.load(cosines + row * width + column, mask=is_column, other=0.0)
        sine = tl.load(sines + row * width + column, mask=is_column, other=0.0)
        states = (exact * cosine + turned * sine).to(states.dtype)
    place = tl.load(places + row) * width + column
    if head < query_heads:
        tl.store(queries + (row * query_heads + head) * width + column, states, mask=is_column)
    elif head < query_heads + key_heads:
        tl.store(keys + (head - query_heads) * head_stride + place, states, mask=is_column)
    else:
        at = (head - query_heads - key_heads) * head_stride + place
        tl.store(values + at, states, mask=is_column)


def place_heads(
    heads: Tensor,
    norms: tuple[nn.RMSNorm, nn.RMSNorm] | None,
    angles: tuple[Tensor, Tensor],
    places: slice | Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """Place heads as `operations.place_heads` does; `heads` and angles must be contiguous."""
    rows, count, width = heads.shape
    key_heads = len(keys)
    if isinstance(places, slice):
        places = torch.arange(places.start, places.stop, device=heads.device)
    queries = heads.new_empty(rows, count - 2 * key_heads, width)
    weights = (heads, heads) if norms is None else [norm.weight for norm in norms]
    place_head[rows, count](
        heads,
        *weights,
        *angles,
        places,
        queries,
        keys,
        values,
        0.0 if norms is None else norms[0].eps,
        head_stride=keys.stride(0),
        query_heads=queries.shape[1],
        key_heads=key_heads,
        width=width,
        wide=1 << (width - 1).bit_length(),
        has_norm=norms is not None,
        num_warps=1,
    )
    return queries


@jit
def silu_times_up_block(
    states: tensor, results: tensor, inner: constexpr, block: constexpr
) -> None:
    """Compute a block of one row of `results` [rows, inner] from `states` [rows, 2 * inner]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    is_column = column < inner
    source = states + row * 2 * inner + column
    gate = tl.load(source, mask=is_column, other=0.0)
    up = tl.load(source + inner, mask=is_column, other=0.0)
    exact = gate.to(tl.float32)
    # torch rounds between the activation and the product.
    activated = (exact / (1.0 + tl.exp(-exact))).to(gate.dtype).to(tl.float32)
    product = (activated * up.to(tl.float32)).to(gate.dtype)
    tl.store(results + row * inner + column, product, mask=is_column)


def silu_times_up(states: Tensor) -> Tensor:
    """Map gates and upward projections `[rows, 2 * inner]`, contiguous, to `[rows, inner]`."""
    rows, inner = len(states), states.shape[1] // 2
    results = states.new_empty(rows, inner)
    grid = (rows, -(-inner // SILU_BLOCK))
    silu_times_up_block[grid](states, results, inner=inner, block=SILU_BLOCK)
    return results
