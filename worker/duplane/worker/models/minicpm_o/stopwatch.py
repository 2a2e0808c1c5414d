"""Measures how long the stages of one launch take, including the work of the device."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch


class Stopwatch:
    """Measures consecutive stages. The host never waits for the device.

    On a CUDA device an event in the CUDA stream marks the end of a stage. The stage ends when both
    the host and the device have reached this mark.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._ends: list[tuple[Sequence[str], float, torch.cuda.Event | None]] = []
        self._begin = self._event()
        self._begin_s = time.monotonic()
        self._final: dict[str, float] | None = None

    def lap(self, *stages: str) -> None:
        """End the part of a stage that began at the last lap. A stage may have several parts.

        If there are several `stages`, the part belongs to each of them.
        """
        self._ends.append((stages, time.monotonic(), self._event()))
        self._final = None

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each stage.

        If the device has not finished a stage, the stage is measured until now, and later stages
        have 0 s.
        """
        if self._final is not None:  # several units of a launch ask, and an event costs time
            return self._final
        now_s = time.monotonic()
        end_s, is_final = self._begin_s, True
        seconds: dict[str, float] = {}
        for stages, host_s, event in self._ends:
            begin_s, end_s = end_s, host_s
            if event is not None and self._begin is not None:
                is_reached = event.query()
                is_final &= is_reached
                device_s = self._begin.elapsed_time(event) / 1e3 if is_reached else float("inf")
                end_s = min(max(host_s, self._begin_s + device_s), now_s)
            for stage in stages:
                seconds[stage] = seconds.get(stage, 0.0) + end_s - begin_s
        self._final = seconds if is_final else None
        return seconds

    def _event(self) -> torch.cuda.Event | None:
        """Put an event at the present end of the CUDA stream. Returns None on a CPU."""
        if not self._is_cuda:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class Laps:
    """The launches of one unit, or of one step of a chat."""

    def __init__(self) -> None:
        self._watches: list[tuple[Stopwatch, str]] = []

    def add(self, watch: Stopwatch, stage: str = "") -> None:
        """Add a launch. With `stage`, all its stages count as this one."""
        self._watches.append((watch, stage))

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each stage, over all launches."""
        total: dict[str, float] = {}
        for watch, stage in self._watches:
            for name, seconds in watch.seconds().items():
                total[stage or name] = total.get(stage or name, 0.0) + seconds
        return total
