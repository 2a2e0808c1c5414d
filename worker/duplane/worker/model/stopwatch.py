"""How long the stages of a batch take, the device's work included."""

from __future__ import annotations

import time

import torch


class Stopwatch:
    """Laps of one batch. On a device that works behind the host, a lap waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._waits = device.type == "cuda"
        self._device = device
        self._start = time.monotonic()
        self.laps: dict[str, float] = {}

    def read(self) -> float:
        """Seconds of the stage so far, without waiting for the device."""
        return time.monotonic() - self._start

    def lap(self, stage: str) -> float:
        """End a stage; its seconds."""
        if self._waits:
            torch.cuda.synchronize(self._device)
        now = time.monotonic()
        self.laps[stage] = now - self._start
        self._start = now
        return self.laps[stage]
