"""The optimisers of training: Muon for the matrices of layers, AdamW for all other tensors.

Muon (https://kellerjordan.github.io/posts/muon/) makes all directions of a matrix's momentum
equally large, with a Newton-Schulz iteration. If `is_mixed`, it runs in bfloat16 where
the CPU has instructions for it, otherwise in float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn

from duplane.worker.models.minicpm_o.dtype import has_bfloat16
from training.torch_calls import (
    backward,
    length,
    split,
    sum_over_processes,
    take_step,
    transposed,
)

MOMENTUM = 0.95
ITERATIONS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
UPDATE_RMS = 0.2
"""RMS of an update's entries. It is about the same as for AdamW, so both optimisers have similar
rates."""
WEIGHT_DECAY = 0.01
CLIP_NORM = 1.0


def orthogonalised(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the matrix with all its singular values near one, computed in `dtype`."""
    first, second, third = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    rows = transposed(matrix) if is_tall else matrix
    rows = (rows / (length(rows) + 1e-7)).to(dtype)
    for _ in range(ITERATIONS):
        square = rows @ transposed(rows)
        rows = first * rows + (second * square + third * (square @ square)) @ rows
    return (transposed(rows) if is_tall else rows).to(matrix.dtype)


def average_gradients(tensors: Sequence[Tensor]) -> None:
    """Average the gradients of all processes of the run, if there are several."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    gradients = [tensor.grad for tensor in tensors if tensor.grad is not None]
    whole = torch.cat([gradient.flatten() for gradient in gradients])
    sum_over_processes(whole)
    whole /= distributed.get_world_size()
    parts = split(whole, [gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def rate_factor(step: int, total: int, *, warm_up: int, decay_share: float) -> float:
    """Return the factor of the learning rates at a step.

    It rises during `warm_up` steps, and falls during the last `decay_share` of the steps to zero at
    step `total`.
    """
    remaining = (total - step) / max(1.0, decay_share * total)
    return min(1.0, (step + 1) / warm_up, remaining)


class Optimisers:
    """Runs both optimisers. `rate` is the learning rate of AdamW, `matrix_rate` that of Muon.

    Muon trains the matrices among `tensors`, except embedding tables, which `tables` names. AdamW
    trains all others, and those in `added` whatever their shape.
    """

    def __init__(
        self,
        tensors: Iterable[Tensor],
        *,
        tables: Iterable[Tensor] = (),
        added: Iterable[Tensor] = (),
        rate: float,
        matrix_rate: float,
        is_mixed: bool = False,
    ) -> None:
        """If `is_mixed`, Muon computes in bfloat16 where the CPU can."""
        is_short = is_mixed and has_bfloat16(torch.device("cpu"))
        self._dtype = torch.bfloat16 if is_short else torch.float32
        found, kept = list(tensors), {id(table) for table in tables}
        self._matrices = [one for one in found if one.dim() == 2 and id(one) not in kept]
        chosen = {id(matrix) for matrix in self._matrices}
        others = [*(one for one in found if id(one) not in chosen), *added]
        self._tensors = [*self._matrices, *others]
        self._momenta = [torch.zeros_like(matrix) for matrix in self._matrices]
        self._rate = rate
        self._matrix_rate = matrix_rate
        self._adam = torch.optim.AdamW(
            others, lr=rate, betas=(0.9, 0.98), weight_decay=WEIGHT_DECAY
        )

    def step(self, loss: Tensor, factor: float) -> None:
        """Compute the gradients of `loss` and take one step; `factor` scales both rates."""
        for tensor in self._tensors:
            tensor.grad = None
        for group in self._adam.param_groups:
            group["lr"] = self._rate * factor
        backward(loss)
        average_gradients([tensor for tensor in self._tensors if tensor.grad is not None])
        nn.utils.clip_grad_norm_([t for t in self._tensors if t.grad is not None], CLIP_NORM)
        take_step(self._adam)
        self._step_matrices(self._matrix_rate * factor)

    @torch.no_grad()
    def _step_matrices(self, rate: float) -> None:
        for matrix, momentum in zip(self._matrices, self._momenta, strict=True):
            if matrix.grad is None:
                continue
            momentum.lerp_(matrix.grad, 1 - MOMENTUM)
            update = orthogonalised(torch.lerp(matrix.grad, momentum, MOMENTUM), self._dtype)
            matrix.mul_(1 - rate * WEIGHT_DECAY)
            matrix.add_(update, alpha=-rate * UPDATE_RMS * max(matrix.shape) ** 0.5)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of both optimisers."""
        return {"adam": self._adam.state_dict(), "momenta": self._momenta}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state."""
        self._adam.load_state_dict(state["adam"])
        for momentum, saved in zip(self._momenta, state["momenta"], strict=True):
            momentum.copy_(saved)
