"""Norm and rotation of heads, and the write of keys and values, as one Triton kernel.

A program computes one head of one row, so its bits do not depend on the other rows of a pass.
Import this module only on CUDA.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from duplane.worker.models.minicpm_o.attention.triton_language import constexpr, jit, tensor, tl

# The addresses of slices of one upload are not aligned alike; that must not compile a kernel anew.
sliced = jit(do_not_specialize_on_alignment=["places"])


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
