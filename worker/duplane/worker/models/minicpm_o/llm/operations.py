"""Operations of a decoder layer that have a form in torch and a Triton kernel.

Every device has the form in torch. On CUDA `use_kernels` replaces it by the kernel, if both agree.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from duplane.worker.models.minicpm_o.llm.kv_cache import KVCache
from duplane.worker.models.minicpm_o.proof import (
    FIRST_ROWS,
    KERNEL_TOLERANCES,
    Proofs,
    relative_error,
)

CHECKED_ROWS = (1, 5)
"""Numbers of rows of the passes for which a kernel is compared with torch."""
LONG_ROWS = 1100
"""Number of rows of the longest context in which attention is compared, if contexts are so long."""


def silu_times_up(states: Tensor) -> Tensor:
    """Map gates and upward projections `[rows, 2 * inner]` to `[rows, inner]`."""
    gate, up = states.chunk(2, dim=-1)
    return functional.silu(gate) * up


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `[..., head_dim]` in float32. `sin` is negative for the first half of `head_dim`."""
    exact = states.float()
    half = exact.shape[-1] // 2
    return (exact * cos + exact.roll(half, -1) * sin).to(states.dtype)


def place_heads(
    heads: Tensor,
    norms: tuple[nn.RMSNorm, nn.RMSNorm] | None,
    angles: tuple[Tensor, Tensor],
    places: slice | Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """Norm and rotate `heads` [rows, heads of queries, keys and values, head_dim].

    `norms` are those of queries and of keys, `angles` the cosines and sines of `Rotary.at`. Writes
    keys and values to `places` [rows] of the pools `keys` and `values` [key heads, rows of the
    pool, head_dim] of one layer; returns the queries [rows, query heads, head_dim].
    """
    new = len(keys)
    rotated, unchanged = heads.tensor_split([-new], 1)
    if norms is not None:
        parts = zip(norms, rotated.tensor_split([-new], 1), strict=True)
        rotated = torch.cat([norm(part) for norm, part in parts], 1)
    queries, rotated_keys = rotate(rotated, *angles).tensor_split([-new], 1)
    keys[:, places] = rotated_keys.transpose(0, 1)
    values[:, places] = unchanged.transpose(0, 1)
    return queries


def kernels() -> Any:
    """Import the module of the kernels, which needs Triton."""
    from duplane.worker.models.minicpm_o.llm import triton_kernels

    return triton_kernels


class Operations:
    """The operations of all layers of one decoder."""

    def __init__(self, inner: int, *, has_head_norm: bool) -> None:
        """`inner` is the width of the feed-forward block."""
        self._inner, self._has_head_norm = inner, has_head_norm
        self.silu_times_up: Callable[[Tensor], Tensor] = silu_times_up
        self.place_heads: Callable[..., Tensor] = place_heads

    @torch.inference_mode()
    def use_kernels(self, cache: KVCache, name: str) -> None:
        """Replace operations by kernels that agree with torch on the device and dtype of `cache`.

        `name` is that of the decoder. All slots of the cache must be empty.
        """
        proofs = Proofs(f"kernels of the {name}")
        tolerance = KERNEL_TOLERANCES[cache.keys.dtype]
        if proofs.accepts("silu times up", partial(_check_silu, cache, self._inner), tolerance):
            self.silu_times_up = kernels().silu_times_up
        if proofs.accepts("heads", partial(_check_heads, cache, self._has_head_norm), tolerance):
            self.place_heads = kernels().place_heads
        is_alike = proofs.accepts("attention", partial(_check_attend, cache), tolerance)
        cache.kernel = kernels().attend if is_alike else None
        for slot in range(cache.slot_count):
            cache.reset(slot)
        proofs.report()


def _check_silu(cache: KVCache, inner: int) -> float:
    """Compare the kernel with torch, for one row and for some rows."""
    kernel = kernels().silu_times_up
    passes = [varied(rows, 2 * inner, like=cache.keys) for rows in CHECKED_ROWS]
    return relative_error([(kernel(states), silu_times_up(states)) for states in passes])


def _check_heads(cache: KVCache, has_norm: bool) -> float:
    """Compare the kernel with torch, for one row and for some rows of a context."""
    kernel, like = kernels().place_heads, cache.keys
    keys, values = cache.keys[0], cache.values[0]
    count, _, width = keys.shape
    norms = None
    if has_norm:
        norms = nn.RMSNorm(width, 1e-6), nn.RMSNorm(width, 1e-6)
        for norm, weight in zip(norms, varied(2, width, like=like), strict=True):
            norm.weight = nn.Parameter(weight, requires_grad=False)
    pairs: list[tuple[Tensor, Tensor]] = []
    for rows in CHECKED_ROWS:
        heads = varied(rows, (cache.queries_per_head + 2) * count, width, like=like)
        cos, sin = varied(2, rows, 1, width, like=like).float().unbind()
        positions = cache.extend([(0, rows)]).positions
        places = cache.pages.rows_at(torch.zeros_like(positions), positions)
        results: list[Tensor] = []
        for place in (kernel, place_heads):
            queries = place(heads, norms, (cos, sin), places, keys, values)
            results += queries, keys[:, places], values[:, places]
        pairs += zip(results[:3], results[3:], strict=True)
        cache.truncate(0, 0)
    return relative_error(pairs)


def _check_attend(cache: KVCache) -> float:
    """Compare the kernel with torch, for many rows and for one, in a long and a short context."""
    kernel = kernels().attend
    heads, _, width = cache.keys.shape[1:]
    sizes = heads * cache.queries_per_head, heads, heads
    first = [(0, min(LONG_ROWS, cache.capacity - 1)), (1, FIRST_ROWS)][: cache.slot_count]
    pairs: list[tuple[Tensor, Tensor]] = []
    for counts in (first, [(slot, 1) for slot, _ in first]):
        rows = cache.extend(counts)
        # Small scores, so that every row of a context counts.
        states = varied(len(rows.positions), sum(sizes), width, like=cache.keys) / 4
        queries, keys, values = states.split_with_sizes(sizes, 1)
        cache.write(0, rows, keys, values)
        plain = cache.attend(0, rows, queries)
        for slot, count in counts:
            cache.truncate(slot, cache.length(slot) - count)
        cache.kernel = kernel
        pairs.append((cache.attend(0, cache.extend(counts), queries), plain))
        cache.kernel = None
    return relative_error(pairs)


def varied(*shape: int, like: Tensor) -> Tensor:
    """Return values between -3 and 3 without a pattern that a wrong index could preserve."""
    count = torch.Size(shape).numel()
    values = torch.arange(count, device=like.device, dtype=torch.float32) * 2.399963
    return (values.remainder(6.0) - 3.0).view(shape).to(like.dtype)
