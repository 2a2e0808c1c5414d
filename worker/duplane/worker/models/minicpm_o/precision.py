"""Process-wide settings of torch for a CUDA device: attention kernels and float32 arithmetic."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch


def configure(device: torch.device) -> None:
    """Set torch up for models on `device`. Changes nothing for a CPU.

    cuDNN's attention is disabled: torch prefers it on recent devices, but it makes a plan for every
    new context length, which takes longer than a unit. TF32 is disabled, so that convolutions and
    matrix products of float32 have the full precision.
    """
    if device.type != "cuda":
        return
    torch.backends.cuda.enable_cudnn_sdp(False)
    _allow_tf32(False)


@contextmanager
def tf32() -> Generator[None]:
    """Let CUDA graphs that are captured inside compute products of float32 in TF32."""
    _allow_tf32(True)
    try:
        yield
    finally:
        _allow_tf32(False)


def _allow_tf32(is_allowed: bool) -> None:
    torch.backends.cudnn.allow_tf32 = is_allowed
    torch.backends.cuda.matmul.allow_tf32 = is_allowed
