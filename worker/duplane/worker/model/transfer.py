"""The two ways between host and device: numbers up, which nobody waits for, and results down.

`download` is the one place where the host waits for the device while units run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(
    values: Sequence[Any] | NDArray[Any] | Tensor,
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Put numbers onto the device, behind the work that it has; the host goes on at once.

    On a CPU an array or a tensor is not copied.
    """
    return torch.as_tensor(values, dtype=dtype).to(device, non_blocking=True)


def download(tensor: Tensor) -> NDArray[Any]:
    """Wait for the device to have made a tensor and return it as an array."""
    return np.asarray(tensor.cpu())
