"""The type of the model's numbers: its names, and the choice that `auto` means."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch

from duplane.worker.models.minicpm_o.checkpoint import Checkpoint

AUTO = "auto"
# In a model with fewer parameters than this, bfloat16 makes a unit at most a few percent faster on
# a CPU. Then the more exact float32 is better.
LEAST_PARAMETERS = 20_000_000
_BFLOAT16_CAPABILITY = (8, 0)  # GPUs from this compute capability on have bfloat16


def choose_dtype(name: str, directory: Path, device: torch.device) -> str:
    """Return the name of a dtype; `auto` becomes bfloat16 or float32.

    `auto` is bfloat16 for a large checkpoint on a device that has instructions for it. Released
    weights are bfloat16 too. Raises `CheckpointError`.
    """
    if name != AUTO:
        return name
    is_large = Checkpoint(directory).parameter_count >= LEAST_PARAMETERS
    return "bfloat16" if is_large and has_bfloat16(device) else "float32"


def has_bfloat16(device: torch.device) -> bool:
    """Return whether the device has instructions for matrix products in bfloat16.

    The result is False for CPUs of Arm, on which bfloat16 was not measured.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= _BFLOAT16_CAPABILITY
    found = cast("Any", torch.cpu).get_capabilities()
    return any(found.get(name) for name in ("avx512_bf16", "amx_bf16"))


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype of this name; raises ValueError if the model does not support it."""
    kinds = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in kinds:
        raise ValueError(f"dtype is {name!r}, not one of {', '.join(kinds)}")
    return kinds[name]
