"""Rates that one client may not exceed for long: units sent to a worker, and CPU time. Pure."""

from __future__ import annotations

import math

_BURST_S = 5.0  # a client that was held up may send this many seconds' worth of units at once
_BURST_WORK_S = 0.05  # CPU seconds that one message may take at once: a long voice, a chat history


class RateLimit:
    """An amount per second, with a bounded burst (the generic cell rate algorithm)."""

    def __init__(self, per_s: float, burst: float) -> None:
        self._per_s = per_s
        self._burst_s = burst / per_s
        self._used_until_s = -math.inf

    def spend(self, now_s: float, amount: float = 1.0) -> float:
        """Count an amount at `now_s`; return how many seconds to wait before the next."""
        used_until_s = max(self._used_until_s, now_s) + amount / self._per_s
        self._used_until_s = used_until_s
        return max(0.0, used_until_s - self._burst_s - now_s)


def unit_rate(units_per_s: float) -> RateLimit:
    """Return the limit of units that one session sends to its worker."""
    return RateLimit(units_per_s, max(_BURST_S * units_per_s - 1, 0.0))


def cpu_quota(share: float) -> RateLimit:
    """Return the limit of CPU seconds that one client's input may take of one core."""
    return RateLimit(share, _BURST_WORK_S)
