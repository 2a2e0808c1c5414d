"""The device of torch: its threads, name and memory, and the model that is loaded onto it."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from duplane.fabric.process import StartError
from duplane.fabric.v1 import registry_pb2
from duplane.worker.engine.cpu_threads import choose_threads, usable_cores
from duplane.worker.engine.interfaces import Model
from duplane.worker.models.minicpm_o.checkpoint import CheckpointError
from duplane.worker.models.minicpm_o.dtype import choose_dtype
from duplane.worker.models.minicpm_o.model import DuplexModel
from duplane.worker.settings import WorkerSettings

_log = logging.getLogger(__name__)


class TorchDevice:
    """A device, `cpu` or `cuda:N`, and the checkpoint to load onto this device."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._device = open_device(settings.device)
        self._threads = settings.threads
        self._dtype = settings.dtype

    def description(self) -> registry_pb2.Device:
        """Describe the device and the type of the model's numbers for operators."""
        if self._device.type != "cuda":
            return registry_pb2.Device(
                name=str(self._device), description=f"{self._threads} threads, {self._dtype}"
            )
        _, memory_bytes = torch.cuda.mem_get_info(self._device)
        return registry_pb2.Device(
            name=str(self._device),
            description=f"{torch.cuda.get_device_name(self._device)}, {self._dtype}",
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
        cores = usable_cores()
        directory = Path(settings.checkpoint)
        self._dtype = choose_dtype(settings.dtype, directory, self._device)
        torch.set_num_threads(settings.threads or cores)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        model = DuplexModel.load(
            directory,
            slot_count=settings.slot_count,
            context_capacity=settings.context_token_limit,
            device=settings.device,
            dtype=self._dtype,
            turn_rows=settings.turn_row_limit,
            cuda_graphs=settings.cuda_graphs,
        )
        if self._device.type == "cpu":
            self._threads = settings.threads or choose_threads(model.parameter_count, cores)
            torch.set_num_threads(self._threads)
            _log.info("the model uses %d threads, of %d usable cores", self._threads, cores)
        _log.info("the model's numbers are %s", self._dtype)
        return model

    def check(self) -> None:
        """Wait until the device is idle. Raises an error if its CUDA context is unusable."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def memory_used_bytes(self, model: Model) -> int:
        """Return the bytes that torch has allocated on a GPU; on a CPU, the model's bytes."""
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device)
        return model.memory_bytes


def open_device(name: str) -> torch.device:
    """Return the device with this name. Raises StartError if there is no such device."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise StartError(f"device is {name!r}, must be cpu or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise StartError(f"device {name} is not there: torch sees {torch.cuda.device_count()}")
    if device.type == "cuda":
        return torch.device("cuda", device.index or 0)  # `cuda` means the first device
    return device
