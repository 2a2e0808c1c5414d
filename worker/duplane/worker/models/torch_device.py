"""The device of torch: its threads, name and memory, and the model that is loaded onto it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from duplane.fabric.process import StartError
from duplane.worker.models.cpu_threads import choose_threads, usable_cores
from duplane.worker.models.interface import (
    DeviceDescription,
    DeviceLostError,
    LoadError,
    Model,
    Preparer,
)
from duplane.worker.settings import WorkerSettings

EnterLane = Callable[[str], AbstractContextManager[None]]
"""`interface.Device.lane`."""

_log = logging.getLogger(__name__)


class TorchFamily(Protocol):
    """What `TorchDevice` needs from a family whose model runs in torch."""

    def choose_dtype(self, settings: WorkerSettings, device: torch.device) -> str:
        """Return the type of the model's numbers. Raises LoadError."""
        ...

    def load(
        self,
        settings: WorkerSettings,
        dtype: str,
        enter: EnterLane,
    ) -> tuple[Preparer, Model]:
        """Load the checkpoint. `enter` is the device's `lane`. Raises LoadError."""
        ...

    def load_preparer(self, settings: WorkerSettings) -> Preparer:
        """Load the preparer of the checkpoint. Raises LoadError."""
        ...


class TorchDevice:
    """A device, `cpu` or `cuda:N`, and the checkpoint that a family loads onto this device."""

    def __init__(self, settings: WorkerSettings, family: TorchFamily) -> None:
        """Open the device. Raises LoadError if it is not there."""
        self._settings = settings
        self._family = family
        try:
            self._device = open_device(settings.device)
        except StartError as error:
            raise LoadError(str(error)) from error
        self._threads = settings.threads
        self._dtype: str = settings.dtype
        self._model_bytes = 0
        self._streams: dict[str, torch.cuda.Stream] = {}  # of the lanes

    def description(self) -> DeviceDescription:
        """Describe the device and the type of the model's numbers for operators."""
        if self._device.type != "cuda":
            return DeviceDescription(str(self._device), f"{self._threads} threads, {self._dtype}")
        _, memory_bytes = torch.cuda.mem_get_info(self._device)
        name = torch.cuda.get_device_name(self._device)
        return DeviceDescription(str(self._device), f"{name}, {self._dtype}", memory_bytes)

    def load(self) -> tuple[Preparer, Model]:
        """Load the checkpoint. Raises LoadError."""
        try:
            return self._load()
        except torch.OutOfMemoryError as error:
            raise LoadError(str(error)) from error

    def _load(self) -> tuple[Preparer, Model]:
        settings = self._settings
        cores = usable_cores()
        dtype = self._family.choose_dtype(settings, self._device)
        self._dtype = dtype
        torch.set_num_threads(settings.threads or cores)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        preparer, model = self._family.load(settings, dtype, self.lane)
        constants = model.constants
        self._model_bytes = constants.memory_bytes
        if self._device.type == "cpu":
            self._threads = settings.threads or choose_threads(constants.parameter_count, cores)
            torch.set_num_threads(self._threads)
            _log.info("the model uses %d threads, of %d usable cores", self._threads, cores)
        _log.info("the model's numbers are %s, its lanes are %d", dtype, constants.lane_count)
        return preparer, model

    def load_preparer(self) -> Preparer:
        """Load the preparer of the checkpoint. It does not use the device. Raises LoadError."""
        return self._family.load_preparer(self._settings)

    def check(self) -> None:
        """Wait until the device is idle. Raises an error if its CUDA context is unusable."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    @contextmanager
    def lane(self, name: str) -> Generator[None]:
        """Run the work inside on the lane's own stream of a GPU, and wait for its end.

        Raises DeviceLostError if the work has failed on the GPU.
        """
        if self._device.type != "cuda":
            yield
            return
        if name not in self._streams:
            torch.cuda.synchronize(self._device)
            self._streams[name] = torch.cuda.Stream(self._device)
        stream = self._streams[name]
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            yield
            try:
                stream.synchronize()
            except RuntimeError as error:
                raise DeviceLostError(str(error)) from error

    def memory_used_bytes(self) -> int:
        """Return the bytes that torch has allocated on a GPU; on a CPU, the model's bytes."""
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device)
        return self._model_bytes


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
