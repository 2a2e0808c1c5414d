"""Measures a device's peak rates: bytes copied and floating point operations."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

ROUNDS = 7
COPY_BYTES = {"cpu": 2**28, "cuda": 2**31}
MATRIX_SIDE = {"cpu": 1024, "cuda": 8192}


@dataclass(frozen=True)
class Peaks:
    """Peak rates: bytes read and written per second, and floating point operations by dtype."""

    bytes_per_s: float
    flops_per_s: dict[torch.dtype, float]


def measure_peaks(device: torch.device, dtypes: set[torch.dtype]) -> Peaks:
    """Copy a large tensor and multiply square matrices; return the best of several rates."""
    count = COPY_BYTES[device.type]
    source = torch.ones(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = 2 * count / _best_s(device, lambda: target.copy_(source))
    side = MATRIX_SIDE[device.type]
    flops: dict[torch.dtype, float] = {}
    for dtype in dtypes:
        matrix = torch.ones(side, side, dtype=dtype, device=device)
        product = torch.empty_like(matrix)
        seconds = _best_s(device, lambda a=matrix, out=product: torch.mm(a, a, out=out))
        flops[dtype] = 2 * side**3 / seconds
    return Peaks(copied, flops)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all work in its queue."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _best_s(device: torch.device, work: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(ROUNDS):
        synchronize(device)
        begin = time.perf_counter()
        work()
        synchronize(device)
        best = min(best, time.perf_counter() - begin)
    return best
