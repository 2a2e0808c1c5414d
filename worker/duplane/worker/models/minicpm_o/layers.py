"""Linear layers and embedding tables, allocated without values for a checkpoint to fill."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypedDict

import torch
from torch import Tensor, nn
from torch.nn import functional


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


class Product:
    """The product of rows with the weight of a layer, or of some layers with the same input."""

    def __init__(self, *layers: nn.Linear) -> None:
        self._layers, first = layers, layers[0]
        has_bias = "bias" in dict(first.named_parameters())
        joined = pack_linear(layers) if len(layers) > 1 else (first.weight, first.bias)
        self.weight, self.bias = joined[0], joined[1] if has_bias else None
        self.packed: Callable[[Tensor], Tensor] | None = None
        """What multiplies in place of `weight`; see `packing`."""

    def __call__(self, rows: Tensor) -> Tensor:
        """Map [..., inputs] to [..., outputs of all layers]."""
        return self.multiply(rows) if self.packed is None else self.packed(rows)

    def multiply(self, rows: Tensor) -> Tensor:
        """Multiply with `weight`."""
        return functional.linear(rows, self.weight, self.bias)

    def drop(self, dtype: torch.dtype) -> None:
        """Drop the values of the weight; its shape stays, and `dtype` is that of `packed`."""
        self.weight = self.weight.new_empty(self.weight.shape, dtype=dtype, device="meta")
        for layer in self._layers:
            values = layer.weight.new_empty(layer.weight.shape, dtype=dtype, device="meta")
            layer.weight = nn.Parameter(values, requires_grad=False)


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
