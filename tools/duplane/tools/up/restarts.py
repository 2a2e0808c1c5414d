"""Computes the delay before a process is started again: longer each time, up to a bound."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_DELAY_S = 0.1
MAX_DELAY_S = 60.0
STABLE_S = 120.0


@dataclass
class RestartDelay:
    """A delay that doubles with each exit.

    After a run of at least `STABLE_S` seconds, the next delay is short again.
    """

    max_delay_s: float = MAX_DELAY_S
    _delay_s: float = FIRST_DELAY_S

    def after_exit(self, ran_s: float) -> float:
        """Return the seconds to wait after a process that ran for `ran_s` has ended."""
        if ran_s >= STABLE_S:
            self._delay_s = FIRST_DELAY_S
        delay_s = self._delay_s
        self._delay_s = min(self.max_delay_s, 2 * delay_s)
        return delay_s
