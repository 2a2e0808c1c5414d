"""Checks a worker before torch is imported, which takes seconds: checkpoint, device, addresses.

The checks that need torch or the content of the files follow when the model is loaded.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

from duplane.fabric.exposure import check_fabric_exposure, check_metrics_exposure
from duplane.fabric.process import StartError
from duplane.worker.settings import WorkerSettings

_DEVICE = re.compile(r"cpu|cuda(?::(?P<index>\d{1,4}))?")
_CONFIG = "config.json"


def check_start(settings: WorkerSettings, *, is_built: bool = True) -> None:
    """Check the checkpoint and the device, but not those of a model that has its own rules.

    `is_built` is False if the checkpoint will be built later. Raises StartError.
    """
    if settings.checkpoint == "scripted" or settings.family:
        return
    directory = Path(settings.checkpoint)
    if is_built and not directory.is_dir():
        raise StartError(f"checkpoint: {directory} is not a directory")
    if is_built and not (directory / _CONFIG).is_file():
        raise StartError(f"checkpoint: {directory} has no {_CONFIG}, so it is no checkpoint")
    check_device(settings.device)


async def check_exposure(settings: WorkerSettings) -> str:
    """Raise StartError, which names the flag to use, if an address is open that nobody allowed.

    Returns a warning about connections without TLS; empty if there is nothing to warn of.
    """
    await check_metrics_exposure(settings.metrics_listen, is_public_allowed=settings.metrics_public)
    return await check_fabric_exposure(settings.listen, settings.schedulers, settings.fabric)


def check_device(name: str) -> None:
    """Raise StartError if there is no such device. `cuda` means the first CUDA device."""
    match = _DEVICE.fullmatch(name)
    if match is None:
        raise StartError(f"device is {name!r}, must be cpu or cuda:N")
    if name == "cpu":
        return
    count = cuda_device_count()
    if int(match["index"] or 0) >= count:
        raise StartError(f"device {name} is not there: this machine has {count} CUDA devices")


def cuda_device_count() -> int:
    """Return the number of CUDA devices that this process may use; 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value
