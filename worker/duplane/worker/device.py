"""The device, as torch knows it: threads, name, memory, and the model put onto it."""

from __future__ import annotations

import torch

from duplane.fabric.process import StartError
from duplane.fabric.v1 import registry_pb2
from duplane.worker.model.checkpoint import CheckpointError
from duplane.worker.model.model import DuplexModel
from duplane.worker.rounds import Model
from duplane.worker.settings import WorkerSettings


class TorchDevice:
    """`cpu` or `cuda:N`, and the checkpoint that is to run there."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._device = open_device(settings.device)

    def description(self) -> registry_pb2.Device:
        """Say what it is, for operators."""
        if self._device.type != "cuda":
            return registry_pb2.Device(name=str(self._device))
        _, memory_bytes = torch.cuda.mem_get_info(self._device)
        return registry_pb2.Device(
            name=str(self._device),
            description=torch.cuda.get_device_name(self._device),
            memory_bytes=memory_bytes,
        )

    def load(self) -> Model:
        """Load the checkpoint. Raises StartError."""
        try:
            return self._load()
        except (CheckpointError, torch.OutOfMemoryError) as error:
            raise StartError(str(error)) from error

    def _load(self) -> Model:
        settings = self._settings
        torch.set_num_threads(settings.threads)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        return DuplexModel.load(
            settings.checkpoint,
            slot_count=settings.slot_count,
            context_capacity=settings.context_token_limit,
            device=settings.device,
            dtype=settings.dtype,
            turn_rows=settings.turn_row_limit,
            cuda_graphs=settings.cuda_graphs,
        )

    def memory_used_bytes(self, model: Model) -> int:
        """Count what torch has allocated on a GPU; on a CPU, what the model says it holds."""
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device)
        return model.memory_bytes


def open_device(name: str) -> torch.device:
    """Return the device of that name. Raises StartError where there is none."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise StartError(f"device is {name!r}, must be cpu or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise StartError(f"device {name} is not there: torch sees {torch.cuda.device_count()}")
    return device
