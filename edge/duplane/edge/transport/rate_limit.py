"""Rate limits of one client: units sent to the worker, and CPU time of its input. Pure."""

from __future__ import annotations

import math

_BURST_S = 5.0  # seconds of units that a client may send in one burst, as after a network delay
_BURST_WORK_S = 0.05  # CPU seconds of one long message, for example with a voice or a chat history


class RateLimit:
    """Limits an amount per second; allows a bounded burst (the generic cell rate algorithm)."""

    def __init__(self, per_s: float, burst: float) -> None:
        self._per_s = per_s
        self._burst_s = burst / per_s
        self._used_until_s = -math.inf

    def spend(self, now_s: float, amount: float = 1.0) -> float:
        """Count an amount at `now_s`; return the seconds to wait before the next call."""
        used_until_s = max(self._used_until_s, now_s) + amount / self._per_s
        self._used_until_s = used_until_s
        return max(0.0, used_until_s - self._burst_s - now_s)


def unit_rate(units_per_s: float, unit_s: float) -> RateLimit:
    """Return the limit of units that one session sends to its worker.

    `units_per_s` is the limit for units of one second. More of them may be sent if a unit lasts
    only `unit_s`, so that the limit of sound is the same.
    """
    per_s = units_per_s / unit_s
    return RateLimit(per_s, max(_BURST_S * per_s - 1, 0.0))


def cpu_quota(share: float) -> RateLimit:
    """Return the limit of CPU time for one client's input. `share` is a share of one core."""
    return RateLimit(share, _BURST_WORK_S)
