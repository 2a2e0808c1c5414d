"""Checks what a worker computes with: the driver, torch and the type of its numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from duplane.fabric.process import StartError
from duplane.tools.doctor.findings import Finding, Level, error, ok
from duplane.worker.settings import WorkerSettings
from duplane.worker.start_check import check_start, cuda_device_count

CHECK = "device"


@dataclass(frozen=True, slots=True)
class Torch:
    """The installed torch: its version, the CUDA that it was built for, and what it can use."""

    version: str
    cuda: str  # empty for a build without CUDA
    device_count: int


def installed_torch() -> Torch | None:
    """Return the installed torch; None if there is none."""
    try:
        import torch
    except ImportError:
        return None
    return Torch(torch.__version__, torch.version.cuda or "", torch.cuda.device_count())


def findings(settings: WorkerSettings) -> Iterator[Finding]:
    """Check the checkpoint and the device, then torch."""
    try:
        check_start(settings)
    except StartError as problem:
        message = str(problem)
        yield error(CHECK, "--checkpoint" if "checkpoint" in message else "--device", message)
        return
    if settings.checkpoint == "scripted" or settings.family:
        yield ok(CHECK, "--checkpoint", "a model with rules of its own")
        return
    found = of_torch(settings.device, installed_torch(), cuda_device_count())
    yield found
    if settings.device != "cpu" and found.level is Level.OK:
        yield of_memory(settings)


def of_torch(device: str, torch: Torch | None, driver_count: int) -> Finding:
    """Compare the device with the installed torch and with the devices of the driver."""
    if torch is None:
        return error(CHECK, "--device", "torch is not installed; install duplane[worker]")
    if device == "cpu":
        return ok(CHECK, "--device", f"the CPU, with torch {torch.version}")
    if not torch.cuda:
        return error(
            CHECK,
            "--device",
            f"torch {torch.version} has no CUDA; install its build for CUDA, or say --device cpu",
        )
    if torch.device_count < driver_count:
        return error(
            CHECK,
            "--device",
            f"the driver has {driver_count} devices, torch {torch.version} can use"
            f" {torch.device_count}: the driver is older than CUDA {torch.cuda} needs",
        )
    return ok(CHECK, "--device", f"{device}, with torch {torch.version} for CUDA {torch.cuda}")


def of_memory(settings: WorkerSettings) -> Finding:
    """Compare the slots with the memory that is free on the GPU, as the worker does."""
    import torch

    from duplane.worker.models.interface import LoadError
    from duplane.worker.models.minicpm_o.dtype import choose_dtype
    from duplane.worker.models.minicpm_o.memory import choose_slot_count

    try:
        dtype = choose_dtype(
            settings.dtype, Path(settings.checkpoint), torch.device(settings.device)
        )
        count = choose_slot_count(settings, dtype)
    except LoadError as problem:
        return error(CHECK, "--slots", str(problem))
    return ok(CHECK, "--slots", f"{count} slots fit into the free memory of {settings.device}")
