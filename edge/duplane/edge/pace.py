"""How fast one client's units may go on to a worker, and how much work it may make. Pure."""

from __future__ import annotations

import math

_BURST_S = 5.0  # what a client that was held up may send at once, as time at its rate
_BURST_WORK_S = 0.05  # of work at once: a long voice, a history


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


class Share:
    """How much of one core a client's input may take, lasting; a little more may go at once."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._used_until_s = -math.inf

    def spend(self, now_s: float, work_s: float) -> float:
        """Count work that was done; return for how long no more may be done."""
        self._used_until_s = max(self._used_until_s, now_s) + work_s / self._share
        return max(0.0, self._used_until_s - _BURST_WORK_S / self._share - now_s)
