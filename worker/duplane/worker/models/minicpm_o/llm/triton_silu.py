"""The product of the gate's silu and the upward projection as one Triton kernel.

Import this module only on CUDA.
"""

from __future__ import annotations

from torch import Tensor

from duplane.worker.models.minicpm_o.attention.triton_language import constexpr, jit, tensor, tl

BLOCK = 1024
"""Number of columns that one program computes."""


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
    grid = (rows, -(-inner // BLOCK))
    silu_times_up_block[grid](states, results, inner=inner, block=BLOCK)
    return results
