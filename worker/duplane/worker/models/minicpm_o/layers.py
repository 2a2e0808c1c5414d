"""Linear layers and embedding tables, allocated without values for a checkpoint to fill."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn


def linear(
    inputs: int, outputs: int, *, bias: bool, device: torch.device, dtype: torch.dtype
) -> nn.Linear:
    """Allocate a linear layer; the weights have no defined values before they are loaded."""
    make = cast("Any", nn.utils).skip_init  # untyped in torch
    return make(nn.Linear, inputs, outputs, bias=bias, device=device, dtype=dtype)


def embedding(rows: int, width: int, *, device: torch.device, dtype: torch.dtype) -> nn.Embedding:
    """Allocate an embedding table; the weights have no defined values before they are loaded."""
    make = cast("Any", nn.utils).skip_init  # untyped in torch
    return make(nn.Embedding, rows, width, device=device, dtype=dtype)


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
