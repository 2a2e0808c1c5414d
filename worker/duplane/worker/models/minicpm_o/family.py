"""Opens checkpoints of MiniCPM-o for the worker."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from duplane.worker.models import interface
from duplane.worker.models.cpu_threads import usable_cores
from duplane.worker.models.minicpm_o import dtype as dtypes
from duplane.worker.models.minicpm_o.memory import choose_slot_count
from duplane.worker.models.minicpm_o.model import DuplexModel
from duplane.worker.models.minicpm_o.preparer import Preparer
from duplane.worker.models.minicpm_o.preparer_parts import (
    PreparerParts,
    load_preparer_parts,
)
from duplane.worker.models.minicpm_o.two_lanes import choose_lane_count
from duplane.worker.models.minicpm_o.vision.processes import confined
from duplane.worker.models.minicpm_o.worker_model import WorkerModel
from duplane.worker.models.torch_device import EnterLane, TorchDevice
from duplane.worker.settings import WorkerSettings

_DECODERS = range(2, 5)  # processes that decode the pictures of units, depending on the cores


def open_device(settings: WorkerSettings) -> interface.Device:
    """Return the device of the settings with their checkpoint."""
    return TorchDevice(settings, _Family())


class _Family:
    """Implements `TorchFamily`."""

    def choose_dtype(self, settings: WorkerSettings, device: torch.device) -> str:
        return dtypes.choose_dtype(settings.dtype, Path(settings.checkpoint), device)

    def load(
        self, settings: WorkerSettings, dtype: str, enter: EnterLane
    ) -> tuple[interface.Preparer, interface.Model]:
        directory = Path(settings.checkpoint)
        preparation = load_preparer_parts(directory)
        model = DuplexModel.load(
            directory,
            slot_count=choose_slot_count(settings, dtype),
            context_capacity=settings.context_token_limit,
            device=settings.device,
            dtype=dtype,
            turn_rows=settings.turn_row_limit,
            context_share=settings.given_context_share,
            cuda_graphs=settings.cuda_graphs,
            has_tf32_vocoder=settings.tf32_vocoder,
            preparation=preparation,
        )
        if not settings.has_engine_process:  # else clients' pictures are decoded elsewhere
            preparation = _confined(preparation)
        lane_count = choose_lane_count(settings.lanes, model, enter)
        preparer = Preparer(preparation, settings.context_token_limit)
        return preparer, WorkerModel(model, lane_count=lane_count)

    def load_preparer(self, settings: WorkerSettings) -> interface.Preparer:
        preparation = _confined(load_preparer_parts(Path(settings.checkpoint)))
        return Preparer(preparation, settings.context_token_limit)


def _confined(parts: PreparerParts) -> PreparerParts:
    """Return the parts, with pictures that are decoded in processes of their own."""
    prompts = parts.prompts
    if prompts.pictures is None:
        return parts
    process_count = min(max(_DECODERS.start, usable_cores()), _DECODERS.stop - 1)
    pictures = confined(prompts.pictures, process_count)
    return replace(parts, prompts=replace(prompts, pictures=pictures))
