"""Triton's language for the kernels of this model, with the types that pyright needs.

Triton has no types. It recognises the constants of a kernel by the name `constexpr`, and accepts
only names of its own as types of the other arguments.

Import modules of kernels only on CUDA: torch's packages for CUDA bring Triton.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

triton: Any = import_module("triton")
jit: Any = triton.jit
tl: Any = triton.language

if TYPE_CHECKING:
    constexpr = tensor = Any
else:
    constexpr, tensor = tl.constexpr, tl.tensor
