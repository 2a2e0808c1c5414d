"""Logs a lasting condition when it begins, then at growing intervals, and finally its end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

_FIRST_INTERVAL_S = 60.0
_MAX_INTERVAL_S = 3600.0


class RepeatedLog:
    """Logs one condition, such as a peer that does not answer."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._since: float | None = None
        self._due = 0.0
        self._interval_s = _FIRST_INTERVAL_S
        self._skipped_count = 0

    def report(self, message: str) -> None:
        """Log that the condition lasts, but at most once in the present interval."""
        now = self._clock()
        if self._since is None:
            self._since = now
            self._due = now
            self._interval_s = _FIRST_INTERVAL_S
        if now < self._due:
            self._skipped_count += 1
            return
        skipped = f" ({self._skipped_count} more times)" if self._skipped_count else ""
        self._log.warning("%s%s", message, skipped)
        self._skipped_count = 0
        if now > self._since:
            self._interval_s = min(2 * self._interval_s, _MAX_INTERVAL_S)
        self._due = now + self._interval_s

    def resolve(self, message: str) -> None:
        """Log that the condition has ended, if it was reported."""
        if self._since is not None:
            self._log.info("%s after %.0f s", message, self._clock() - self._since)
        self._since = None
        self._skipped_count = 0
