"""Reports the progress of a training run on stderr: its steps, CPU time, and mean losses."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping

from torch import Tensor


class Progress:
    """Averages the losses of a run, and prints them every `interval` steps.

    Each mean keeps the share `memory` of its value at a step. `spent_s` is the CPU time of the run
    before it was stopped.
    """

    def __init__(
        self,
        name: str,
        total: int,
        *,
        interval: int = 10,
        memory: float = 0.9,
        spent_s: float = 0.0,
    ) -> None:
        self._name, self._total = name, total
        self._interval, self._memory = interval, memory
        self._began = time.process_time() - spent_s
        self._means: dict[str, float] = {}

    @property
    def spent_s(self) -> float:
        """The CPU time of the run."""
        return time.process_time() - self._began

    def note(self, step: int, losses: Mapping[str, Tensor]) -> None:
        """Add the losses of a step, and print the means if it is time to."""
        for name, loss in losses.items():
            value = loss.item()
            before = self._means.get(name, value)
            self._means[name] = self._memory * before + (1 - self._memory) * value
        if step % self._interval == 0:
            shown = "  ".join(f"{name} {value:.3f}" for name, value in self._means.items())
            sys.stderr.write(f"{self._name} {step}/{self._total}  {self.spent_s:.0f} s  {shown}\n")
