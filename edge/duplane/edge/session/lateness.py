"""How often a session prepares to leave a slow worker. Pure."""

from __future__ import annotations

import math

# A session prepares to leave a slow worker at most once in _PAUSE_S. This pause doubles, up to
# _MAX_PAUSE_S, with each preparation, even one that moves the session: if all workers are
# overloaded, preparations make them even slower. After _QUIET_PAUSES such pauses without a
# preparation, the first pause counts again.
_PAUSE_S = 10.0
_MAX_PAUSE_S = 640.0
_QUIET_PAUSES = 4


class Lateness:
    """When a session last prepared to leave a slow worker, and the pause after that."""

    def __init__(self) -> None:
        self._prepared_s = -math.inf  # monotonic
        self._pause_s = _PAUSE_S

    def may_prepare(self, now_s: float) -> bool:
        """Return whether the pause is over at the monotonic time `now_s`."""
        return now_s - self._prepared_s >= self._pause_s

    def prepare(self, now_s: float) -> None:
        """Record a preparation, which begins the next pause."""
        is_again = now_s - self._prepared_s < _QUIET_PAUSES * self._pause_s
        self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S) if is_again else _PAUSE_S
        self._prepared_s = now_s

    def forget(self) -> None:
        """End the pause."""
        self._prepared_s = -math.inf
