"""How fast one client's units may go on to a worker. Pure."""

from __future__ import annotations

import math

_BURST_S = 5.0  # what a client that was held up may send at once, as time at its rate


class Pace:
    """A rate that lasts, above which a few may go at once (the generic cell rate algorithm)."""

    def __init__(self, per_s: float) -> None:
        self._interval_s = 1 / per_s
        self._slack_s = max(_BURST_S - self._interval_s, 0.0)
        self._used_until_s = -math.inf

    @property
    def due_s(self) -> float:
        """When the next one may go, in monotonic seconds."""
        return self._used_until_s - self._slack_s

    def spend(self, now_s: float) -> None:
        """Count one that goes now."""
        self._used_until_s = max(self._used_until_s, now_s) + self._interval_s
