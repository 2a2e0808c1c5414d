"""Packs weights on a CPU: the forms with which its libraries multiply few rows the fastest.

A pass of a decoder has few rows, so its time is that of reading the weights. In float32, FBGEMM
reads weights in float16 and computes in float32. Released weights have at most the 11 digits of
float16, so this changes only tiny ones, by less than what float32 rounds in a product, and reads
half of the bytes. In bfloat16, oneDNN reads weights in the order of its own blocks. The original
weights are dropped. A check compares each product with the plain one first: see `proof`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from duplane.worker.models.minicpm_o.dtype import has_bfloat16
from duplane.worker.models.minicpm_o.layers import Product
from duplane.worker.models.minicpm_o.llm.operations import varied
from duplane.worker.models.minicpm_o.proof import KERNEL_TOLERANCES, Proofs, relative_error

FEWEST_VALUES = 1 << 18
"""Smaller weights stay: with them, a call of the other library costs more than it saves."""
CHECKED_ROWS = (1, 5, 40)
LARGEST_CHANGE = 2.0**-22
"""By how much float16 may change a row of a weight, as a share of the sum of its absolute values.
In float32, the sum of some hundred products rounds by more."""

_operators = cast("Any", torch.ops)


@torch.inference_mode()
def pack_products(module: nn.Module, name: str) -> None:
    """Pack the weights of all products in the module that can be packed, and drop the originals.

    The parameters then have no values: they are on the meta device, with the dtype of the packed
    weight.
    """
    proofs = Proofs(f"packed weights of the {name}")
    for part in module.modules():
        for product in vars(part).values():
            if isinstance(product, Product) and product.weight.numel() >= FEWEST_VALUES:
                _pack(product, proofs)
    proofs.report()


def _pack(product: Product, proofs: Proofs) -> None:
    weight = product.weight
    if weight.dtype == torch.float32 and "fbgemm" in torch.backends.quantized.supported_engines:
        if not fits_float16(weight):
            return
        make, held = _in_float16, torch.float16
    elif weight.dtype == torch.bfloat16 and has_bfloat16(weight.device):
        make, held = _in_blocks, torch.bfloat16
    else:
        return

    def check() -> float:
        product.packed = make(product)
        passes = [varied(rows, weight.shape[1], like=weight) for rows in CHECKED_ROWS]
        return relative_error([(product(rows), product.multiply(rows)) for rows in passes])

    name = f"{weight.shape[0]} x {weight.shape[1]}"
    if proofs.accepts(name, check, KERNEL_TOLERANCES[weight.dtype]):
        product.drop(held)
    else:
        product.packed = None


def fits_float16(weight: Tensor) -> bool:
    """Return whether float16 changes no row of the weight by more than `LARGEST_CHANGE`."""
    for part in torch.split(weight, 4096):  # bounds the memory of the check
        change = (part.half().float() - part).abs().sum(1)
        if not bool(torch.all(change <= LARGEST_CHANGE * part.abs().sum(1))):
            return False
    return True


def _in_float16(product: Product) -> Callable[[Tensor], Tensor]:
    operators = _operators.quantized
    packed = operators.linear_prepack_fp16(product.weight, product.bias)
    return lambda rows: operators.linear_dynamic_fp16(rows, packed)


def _in_blocks(product: Product) -> Callable[[Tensor], Tensor]:
    operators, bias = _operators.mkldnn, product.bias
    packed = operators._reorder_linear_weight(product.weight, None)
    return lambda rows: operators._linear_pointwise(rows, packed, bias, "none", [], "")
