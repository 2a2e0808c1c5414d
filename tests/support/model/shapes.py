"""Records the shapes with which operations are called."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Shapes(TorchDispatchMode):
    """Records the shapes of all tensors, and the other arguments, of some operations.

    These are the operations whose names contain one of `names`. `found` has a tuple for each call:
    the name, the shapes, and the other arguments as text.
    """

    def __init__(self, *names: str) -> None:
        super().__init__()
        self._names = names
        self.found: set[tuple[Any, ...]] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(name in func._schema.name for name in self._names):
            tensors = [value for value in args if isinstance(value, torch.Tensor)]
            others = [value for value in args if not isinstance(value, torch.Tensor)]
            shapes = (tuple(value.shape) for value in tensors)
            self.found.add((func._schema.name, *shapes, str(others)))
        return func(*args, **(kwargs or {}))


PLANNED = ("conv", "linear", "mm", "matmul", "scaled_dot_product", "stft")
"""Parts of the names of operations whose first call with a new shape may be slow on a GPU."""
