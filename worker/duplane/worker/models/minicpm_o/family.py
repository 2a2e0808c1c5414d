"""Opens checkpoints of MiniCPM-o for the worker."""

from __future__ import annotations

from pathlib import Path

import torch

from duplane.worker.models import interface
from duplane.worker.models.minicpm_o import dtype as dtypes
from duplane.worker.models.minicpm_o.model import DuplexModel
from duplane.worker.models.minicpm_o.preparer import Preparer
from duplane.worker.models.minicpm_o.preparer_parts import load_preparer_parts
from duplane.worker.models.minicpm_o.worker_model import WorkerModel
from duplane.worker.models.torch_device import TorchDevice
from duplane.worker.settings import WorkerSettings


def open_device(settings: WorkerSettings) -> interface.Device:
    """Return the device of the settings with their checkpoint."""
    return TorchDevice(settings, _Family())


class _Family:
    """Implements `TorchFamily`."""

    def choose_dtype(self, settings: WorkerSettings, device: torch.device) -> str:
        return dtypes.choose_dtype(settings.dtype, Path(settings.checkpoint), device)

    def load(
        self, settings: WorkerSettings, dtype: str
    ) -> tuple[interface.Preparer, interface.Model]:
        directory = Path(settings.checkpoint)
        preparation = load_preparer_parts(directory)
        model = DuplexModel.load(
            directory,
            slot_count=settings.slot_count,
            context_capacity=settings.context_token_limit,
            device=settings.device,
            dtype=dtype,
            turn_rows=settings.turn_row_limit,
            cuda_graphs=settings.cuda_graphs,
            preparation=preparation,
        )
        return Preparer(preparation, settings.context_token_limit), WorkerModel(model)
