"""Operations of a decoder layer that have a form in torch and a Triton kernel.

Every device has the form in torch. On CUDA `use_kernels` replaces it by the kernel, if both agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from duplane.worker.models.minicpm_o.proof import KERNEL_TOLERANCES, Proofs, relative_error

CHECKED_ROWS = (1, 5)
"""Numbers of rows of the passes for which a kernel is compared with torch."""


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


@torch.inference_mode()
def use_kernels(operations: Operations, weight: Tensor, *, inner: int, name: str) -> None:
    """Replace operations by kernels, if these agree with torch on the device and dtype of `weight`.

    `inner` is the width of the feed-forward block, `name` is that of the decoder.
    """
    proofs = Proofs(f"kernels of the {name}")
    tolerance = KERNEL_TOLERANCES[weight.dtype]

    def check_silu() -> float:
        kernel = triton_silu_times_up()
        passes = [varied(rows, 2 * inner, like=weight) for rows in CHECKED_ROWS]
        return relative_error([(kernel(states), silu_times_up(states)) for states in passes])

    if proofs.accepts("silu times up", check_silu, tolerance):
        operations.silu_times_up = triton_silu_times_up()
    proofs.report()


def varied(*shape: int, like: Tensor) -> Tensor:
    """Return values between -3 and 3 without a pattern that a wrong index could preserve."""
    count = torch.Size(shape).numel()
    values = torch.arange(count, device=like.device, dtype=torch.float32) * 2.399963
    return (values.remainder(6.0) - 3.0).view(shape).to(like.dtype)
