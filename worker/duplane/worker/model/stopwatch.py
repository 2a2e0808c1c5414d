"""Measures how long the stages of one batch take, including the work of the device."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch


@dataclass
class Stopwatch:
    """Measures consecutive stages. On a CUDA device, `lap` waits until the stage has finished."""

    device: torch.device
    laps: dict[str, float] = field(default_factory=dict[str, float])
    lap_start_s: float = field(default_factory=time.monotonic)

    def read(self) -> float:
        """Return the seconds since the last lap, without waiting for the device."""
        return time.monotonic() - self.lap_start_s

    def lap(self, stage: str) -> float:
        """End a stage, or a part of it. Return the seconds of the stage so far."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.monotonic()
        self.laps[stage] = self.laps.get(stage, 0.0) + now - self.lap_start_s
        self.lap_start_s = now
        return self.laps[stage]
