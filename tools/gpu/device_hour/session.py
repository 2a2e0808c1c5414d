"""The options of a run, the sizes of its stages, and the model that the stages of a group share."""

from __future__ import annotations

import gc
import logging
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from device_hour.driver import Driver
from device_hour.results import Results
from duplane.tools.bench.peaks import synchronize
from duplane.tools.checkpoint.random_weights import write_random
from duplane.worker.models.minicpm_o.checkpoint import read_config
from duplane.worker.models.minicpm_o.dtype import torch_dtype
from duplane.worker.models.minicpm_o.loader import load_parts
from duplane.worker.models.minicpm_o.memory import (
    GRAPH_BYTES,
    WORK_SHARE,
    StageMemory,
    plan_vocoder,
    slots_that_fit,
    stages,
)
from duplane.worker.models.minicpm_o.model import DuplexModel
from duplane.worker.models.minicpm_o.preparer_parts import VOCODER_FOLDER
from duplane.worker.models.minicpm_o.probe import Probe
from duplane.worker.models.minicpm_o.two_lanes import choose_lane_count
from duplane.worker.models.minicpm_o.worker_model import WorkerModel
from duplane.worker.models.torch_device import EnterLane

LIKE = "minicpm-o-4.5"
FULL_BYTES = 25 * 10**9
"""Upper bound of the size of a full checkpoint."""
SHARED_MEMORY = Path("/dev/shm")
FEWER = 0.75
"""If a model does not fit, it is loaded again with this share of its slots."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sizes:
    """The sizes of the stages.

    - `scale`: the size of the random checkpoint. `context`: the rows of a conversation's context.
    - `contexts`: the rows with which conversations are measured.
    - `repeats`: how often a call is measured. `course`: the units of a conversation that is
      compared.
    - `warm_s`, `crowd_s`, `full_crowd_s`: seconds of conversations at the pace of real time: that
      are not counted, with few conversations, and with all slots.
    """

    scale: float
    context: int
    contexts: tuple[int, ...]
    repeats: int
    course: int
    warm_s: float
    crowd_s: float
    full_crowd_s: float


FULL = Sizes(1.0, 8192, (512, 7168, 4096), 8, 12, 5.0, 45.0, 150.0)
REHEARSAL = Sizes(0.01, 512, (64,), 1, 2, 0.5, 0.5, 4.0)
REHEARSAL_SLOTS = 3


@dataclass(frozen=True)
class Options:
    """The flags of a run. `rehearses` means a tiny model and few repetitions.

    Without `cuda_graphs` no graph is captured. `again` means that failed stages run again.
    """

    out: Path
    checkpoint: Path | None = None
    device_name: str = "cuda:0"
    dtype: str = "bfloat16"
    cuda_graphs: bool = True
    rehearses: bool = False
    again: bool = False

    @property
    def device(self) -> torch.device:
        """The torch device."""
        return torch.device(self.device_name)

    @property
    def sizes(self) -> Sizes:
        """The sizes of the stages."""
        return REHEARSAL if self.rehearses else FULL


@dataclass
class Loaded:
    """A model, the driver of its slots, and the seconds of each part of the load."""

    model: DuplexModel
    seconds: dict[str, float]
    is_captured: bool = False

    @cached_property
    def driver(self) -> Driver:
        """The driver of the model's slots."""
        return Driver(self.model.preparer, WorkerModel(self.model))

    def served(self, enter: EnterLane) -> WorkerModel:
        """Return the model as a worker runs it, in two lanes if these prove themselves."""
        lane_count = choose_lane_count("auto", self.model, enter)
        return WorkerModel(self.model, lane_count=lane_count)


@dataclass
class Session:
    """What the stages of one group share. `keep` stores a part of the present stage's result."""

    options: Options
    results: Results
    keep: Callable[[dict[str, Any]], None] = lambda _: None
    ends_s: float = float("inf")
    """When the present stage should begin nothing more (monotonic)."""
    probe: Probe = field(default_factory=Probe)
    _loaded: Loaded | None = None
    _slots: int = 0
    _error: Exception | None = None

    @property
    def device(self) -> torch.device:
        """The torch device."""
        return self.options.device

    @property
    def sizes(self) -> Sizes:
        """The sizes of the stages."""
        return self.options.sizes

    def has_time(self, seconds: float = 0.0) -> bool:
        """Return whether the stage may begin another measurement, which takes `seconds`."""
        return time.monotonic() + seconds < self.ends_s

    def checkpoint(self) -> tuple[Path, float]:
        """Return the checkpoint, and the seconds in which it was written just now.

        Without the flag, this is a random checkpoint in memory or in the temporary folder, which is
        written once for each machine.
        """
        if self.options.checkpoint is not None:
            return self.options.checkpoint, 0.0
        if self.options.rehearses:
            folder = self.options.out
        else:
            in_memory = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free
            folder = SHARED_MEMORY if in_memory > FULL_BYTES else Path(tempfile.gettempdir())
        found = folder / f"duplane-hour-{self.sizes.scale:g}"
        if found.exists():
            return found, 0.0
        begin = time.monotonic()
        unfinished = folder / f"{found.name}.part"
        shutil.rmtree(unfinished, ignore_errors=True)
        write_random(unfinished, LIKE, factor=self.sizes.scale, device=self.device)
        unfinished.rename(found)
        return found, time.monotonic() - begin

    @cached_property
    def planned(self) -> list[StageMemory]:
        """The planned memory of each stage."""
        directory, _ = self.checkpoint()
        return stages(
            read_config(directory),
            capacity=self.sizes.context,
            dtype=torch_dtype(self.options.dtype),
            vocoder=plan_vocoder(directory / VOCODER_FOLDER),
        )

    def fitting(self) -> tuple[int, int]:
        """Return the free bytes of the device, and the number of slots that fit.

        In a rehearsal the free bytes are those that `REHEARSAL_SLOTS` slots need.
        """
        if self.options.rehearses:
            needed = sum(s.fixed_bytes + REHEARSAL_SLOTS * s.slot_bytes for s in self.planned)
            free_bytes = int(1.001 * (needed + GRAPH_BYTES) / (1 - WORK_SHARE))
        else:
            free_bytes, _ = torch.cuda.mem_get_info(self.device)
            # What torch keeps after earlier stages is free for the model, too.
            free_bytes += torch.cuda.memory_reserved(self.device)
            free_bytes -= torch.cuda.memory_allocated(self.device)
        return free_bytes, slots_that_fit(self.planned, free_bytes, graph_bytes=GRAPH_BYTES)

    def loaded(self, *, captures: bool = True) -> Loaded:
        """Return the model, loaded at the first call and, with `captures`, captured.

        The number of slots is that of earlier groups, or the number that fits the free memory; if
        the device has too little memory then, `FEWER` of them. Raises the error of an earlier call.
        """
        if self._error is not None:
            raise self._error
        while True:
            try:
                return self._attempt(captures=captures)
            except torch.OutOfMemoryError as error:
                if self._slots == 1:
                    self._error = error
                    raise
                _log.warning("%d slots do not fit: %s", self._slots, error)
            except Exception as error:
                self._error = error
                raise
            self._slots = max(1, int(self._slots * FEWER))
            self._loaded = None
            gc.collect()

    def clean_up(self) -> None:
        """Close the conversations that a failed stage has left open."""
        if self._loaded is not None:
            self._loaded.driver.close()

    def _attempt(self, *, captures: bool) -> Loaded:
        directory, written_s = self.checkpoint()
        if not self._slots:
            earlier = [result["slots"] for result in self.results.every("load")]
            self._slots = min(earlier) if earlier else self.fitting()[1]
        if self._loaded is None:
            begin = time.monotonic()
            model = self._weights(directory, self._slots)
            seconds = {"checkpoint": written_s, "weights": time.monotonic() - begin}
            self._loaded = Loaded(model, seconds)
        if captures and self.options.cuda_graphs and not self._loaded.is_captured:
            self._capture(self._loaded)
        return self._loaded

    def _weights(self, directory: Path, slots: int) -> DuplexModel:
        parts = load_parts(
            directory,
            slot_count=slots,
            context_capacity=self.sizes.context,
            device=self.options.device_name,
            dtype=self.options.dtype,
        )
        model = DuplexModel(parts, probe=self.probe)
        synchronize(self.device)
        return model

    def _capture(self, loaded: Loaded) -> None:
        begin = time.monotonic()
        if self.device.type == "cuda":
            loaded.model.capture()
            synchronize(self.device)
        loaded.seconds["graphs"] = time.monotonic() - begin
        loaded.is_captured = True


def memory_gb(device: torch.device) -> dict[str, float]:
    """Return the device's memory in GB: what torch holds, and what is free."""
    if device.type != "cuda":
        return {}
    found = {
        "allocated": torch.cuda.memory_allocated(device),
        "most_allocated": torch.cuda.max_memory_allocated(device),
        "reserved": torch.cuda.memory_reserved(device),
        "most_reserved": torch.cuda.max_memory_reserved(device),
        "free": torch.cuda.mem_get_info(device)[0],
    }
    return {name: value / 1e9 for name, value in found.items()}
