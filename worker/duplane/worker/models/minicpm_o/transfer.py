"""Copies between host and device. Only `download` makes the host wait for the device."""

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


def download(tensor: Tensor) -> NDArray[Any]:
    """Wait until the device has computed a tensor; return it as an array."""
    return np.asarray(tensor.cpu())
