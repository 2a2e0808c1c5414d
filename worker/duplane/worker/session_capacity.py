"""How many sessions a device can serve, from the latencies of its speaking units. Pure."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

P99_PER_P95 = 1.25
"""The p99 of the latency of speaking units, as a multiple of their p95. In the simulations of
`duplane bench schedule`, for fast and slow devices, it was 1.0 to 1.4 and 1.14 on average."""
WINDOW_S = 30.0
SURE_COUNT = 4
"""Below the limit, so many sessions more are always taken: with few sessions the latency hardly
depends on their number."""
_UPDATE_S = 1.0
_KEPT_COUNT = 2048


class SessionCapacity:
    """Expects that the latency of speech grows at most in proportion to the sessions.

    So a burst of sessions cannot outrun what was measured within `WINDOW_S`. In simulations the
    latency grows less, and the capacity rises with each measurement.
    """

    def __init__(self, limit_s: float) -> None:
        """Let 99 % of the speaking units be answered within `limit_s`; infinity is no limit."""
        self.expected_s = 0.0
        """The p99 that the latest units let expect; 0 without units."""
        self.count = math.inf
        """The sessions that can be served, at least 1; infinity without units."""
        self._limit_s = limit_s
        # Time, latency and sessions of the latest speaking units.
        self._units: deque[tuple[float, float, int]] = deque(maxlen=_KEPT_COUNT)
        self._updated_s = -math.inf

    def note(self, latency_s: float, sessions: int, now_s: float) -> None:
        """Record a speaking unit, and how many sessions there were. Results follow each second."""
        self._units.append((now_s, latency_s, sessions))
        if now_s - self._updated_s < _UPDATE_S:
            return
        self._updated_s = now_s
        while self._units[0][0] < now_s - WINDOW_S:
            self._units.popleft()
        latencies = sorted(latency for _, latency, _ in self._units)
        self.expected_s = P99_PER_P95 * latencies[int(0.95 * len(latencies))]
        served = median(count for _, _, count in self._units)
        if self.expected_s <= self._limit_s:
            proportion = self._limit_s / max(self.expected_s, 1e-9)
            self.count = max(served + SURE_COUNT, served * proportion)
        else:
            self.count = max(1.0, served * self._limit_s / self.expected_s)
