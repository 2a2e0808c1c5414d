"""Operations of a decoder layer that have a form in torch and a Triton kernel.

Every device has the form in torch. On CUDA `use_kernels` replaces it by the kernel, if both agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from duplane.worker.models.minicpm_o.llm.attention import Kernel
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


@dataclass
class Operations:
    """The operations of all layers of one decoder."""

    silu_times_up: Callable[[Tensor], Tensor] = silu_times_up


def triton_silu_times_up() -> Callable[[Tensor], Tensor]:
    """Import the kernel, which needs Triton."""
    from duplane.worker.models.minicpm_o.llm import triton_silu

    return triton_silu.silu_times_up


def triton_attend() -> Kernel:
    """Import the kernel, which needs Triton."""
    from duplane.worker.models.minicpm_o.llm import triton_attention

    return triton_attention.attend


@torch.inference_mode()
def use_kernels(operations: Operations, cache: KVCache, *, inner: int, name: str) -> None:
    """Replace operations by kernels, if these agree with torch on the device and dtype of `cache`.

    `inner` is the width of the feed-forward block, `name` is that of the decoder. All slots of the
    cache must be empty.
    """
    proofs = Proofs(f"kernels of the {name}")
    tolerance = KERNEL_TOLERANCES[cache.keys.dtype]

    def check_silu() -> float:
        kernel = triton_silu_times_up()
        passes = [varied(rows, 2 * inner, like=cache.keys) for rows in CHECKED_ROWS]
        return relative_error([(kernel(states), silu_times_up(states)) for states in passes])

    if proofs.accepts("silu times up", check_silu, tolerance):
        operations.silu_times_up = triton_silu_times_up()
    is_alike = proofs.accepts("attention", partial(_check_attend, cache), tolerance)
    cache.kernel = triton_attend() if is_alike else None
    for slot in range(cache.slot_count):
        cache.reset(slot)
    proofs.report()


def _check_attend(cache: KVCache) -> float:
    """Compare the kernel with torch, for many rows and for one, in a long and a short context."""
    kernel = triton_attend()
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
