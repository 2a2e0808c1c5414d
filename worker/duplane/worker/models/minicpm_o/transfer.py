"""Copies between host and device. Only `download` and `Download.result` make the host wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PINNED_BYTES = 1 << 16
"""Larger uploads, in bytes, go through pinned memory."""


def upload(
    values: Sequence[Any] | NDArray[Any] | Tensor,
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Copy numbers to the device in the order of its CUDA stream, without waiting for it.

    For the CPU, an array or a tensor is not copied. For a GPU, large values are first copied to
    pinned memory, because the host would have to wait while the driver copies pageable memory.
    """
    tensor = torch.as_tensor(values, dtype=dtype)
    if device.type == "cuda" and tensor.device.type == "cpu" and tensor.nbytes > PINNED_BYTES:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def refill(target: Tensor, values: NDArray[Any]) -> None:
    """Copy an array into a tensor in the order of its CUDA stream, without waiting for it."""
    source = torch.as_tensor(values)
    target.copy_(source.pin_memory() if target.device.type == "cuda" else source, non_blocking=True)


def download(tensor: Tensor) -> NDArray[Any]:
    """Wait until the device has computed a tensor; return it as an array."""
    return np.asarray(tensor.cpu())


class Download:
    """A tensor on its way to the host. It is copied in the order of the CUDA stream."""

    def __init__(self, tensor: Tensor) -> None:
        """Begin the copy. The tensor may change as soon as the device has copied it."""
        self._here, self._is_there = tensor, None
        if tensor.device.type == "cuda":
            self._here = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._here.copy_(tensor, non_blocking=True)
            self._is_there = torch.cuda.Event()
            self._is_there.record()

    def result(self) -> NDArray[Any]:
        """Wait for the copy; return it as an array."""
        if self._is_there is not None:
            self._is_there.synchronize()
        return download(self._here)
