"""Counts how often the host waits for the device: for values, or for shapes that depend on values.

The operations of torch are counted by name, so a run on a CPU shows how often the host would wait
for a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
READS: set[Any] = {getattr(Tensor, name) for name in ("cpu", "tolist")}
DEPENDENT = {
    _aten._local_scalar_dense.default,  # pyright: ignore[reportPrivateUsage]  has no public name
    _aten.nonzero.default,
    _aten.masked_select.default,
    _aten.repeat_interleave.Tensor,
    _aten.equal.default,
}
INDEXED = {_aten.index.Tensor, _aten.index_put_.default, _aten.index_put.default}


class SyncCount:
    """Counts the waits in the body of `with SyncCount() as syncs`. `syncs.count` has the sum."""

    def __init__(self) -> None:
        self.count = 0
        self._modes: tuple[Any, Any] = (_Reads(self), _Dependent(self))

    def __enter__(self) -> SyncCount:
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)


class _Reads(TorchFunctionMode):
    """Counts copies to the host."""

    def __init__(self, syncs: SyncCount) -> None:
        super().__init__()
        self._syncs = syncs

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._syncs.count += func in READS
        return func(*args, **(kwargs or {}))


class _Dependent(TorchDispatchMode):
    """Counts operations that wait for values, including those that torch calls internally."""

    def __init__(self, syncs: SyncCount) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]  untyped in torch
        self._syncs = syncs

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._syncs.count += func in DEPENDENT or (func in INDEXED and _has_mask(args[1]))
        return func(*args, **(kwargs or {}))


def _has_mask(indices: object) -> bool:
    found = cast("Sequence[Tensor | None]", indices)
    return any(index is not None and index.dtype is torch.bool for index in found)
