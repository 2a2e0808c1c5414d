"""Linear layers and embedding tables, allocated without values for a checkpoint to fill."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import torch
from torch import Tensor, nn


class Storage(TypedDict):
    """Where and how the parameters of a module are stored."""

    device: torch.device
    dtype: torch.dtype


class _Linear(nn.Linear):
    def reset_parameters(self) -> None:
        """Compute no values: the checkpoint has them."""


class _Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        """Compute no values: the checkpoint has them.

        On the meta device, the first random values would import `torch._dynamo`, for a second.
        """


def linear(
    inputs: int, outputs: int, *, bias: bool, device: torch.device, dtype: torch.dtype
) -> nn.Linear:
    """Allocate a linear layer; the weights have no defined values before they are loaded."""
    return _Linear(inputs, outputs, bias=bias, device=device, dtype=dtype)


def embedding(
    rows: int, width: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None
) -> nn.Embedding:
    """Allocate an embedding table; the weights have no defined values before they are loaded."""
    return _Embedding(rows, width, device=device, dtype=dtype)


def allocate(module: nn.Module, device: str | torch.device, dtype: torch.dtype) -> None:
    """Allocate the parameters of a module that was built on the meta device, without values.

    `nn.Module.to_empty` does the same, but imports sympy for a tensor on the meta device.
    """
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            values = torch.empty(parameter.shape, device=device, dtype=dtype)
            setattr(owner, name, nn.Parameter(values))


def pack_linear(layers: Sequence[nn.Linear]) -> tuple[Tensor, Tensor]:
    """Pack layers with the same input into one weight [outputs, inputs] and one bias [outputs].

    The parameters of the layers become views of the packed tensors. So the memory does not grow,
    and a later change of a parameter in place changes the packed tensor. For a layer without bias,
    the packed bias is zero.
    """
    weight = torch.cat([layer.weight.detach() for layer in layers])
    bias = weight.new_zeros(len(weight))
    start = 0
    for layer in layers:
        rows = slice(start, start + layer.out_features)
        layer.weight = nn.Parameter(weight[rows], requires_grad=False)
        if "bias" in dict(layer.named_parameters()):
            bias[rows] = layer.bias.detach()
            layer.bias = nn.Parameter(bias[rows], requires_grad=False)
        start = rows.stop
    return weight, bias
