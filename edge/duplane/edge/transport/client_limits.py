"""Limits of connections and sessions, in total and per client address."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from enum import Enum, auto


class LimitReached(Enum):
    """The limit that allows no further connection or session."""

    TOTAL = auto()
    CLIENT = auto()


class ClientLimiter:
    """Counts open and refused connections or sessions, in total and per client.

    For one thread only.
    """

    def __init__(self, total: int, per_client: int) -> None:
        self._total = total
        self._per_client = per_client
        self.count = 0
        self.refused_count = 0
        self._client_counts: Counter[str] = Counter()

    def acquire(self, client: str | None) -> Callable[[], None] | LimitReached:
        """Count one more for `client`. Return a function that undoes this, or the limit reached.

        `client` None means a trusted proxy. A proxy serves many clients, so only the limit of the
        total applies.
        """
        if self.count >= self._total:
            self.refused_count += 1
            return LimitReached.TOTAL
        if client is not None and self._client_counts[client] >= self._per_client:
            self.refused_count += 1
            return LimitReached.CLIENT
        self.count += 1
        if client is not None:
            self._client_counts[client] += 1

        def release() -> None:
            self.count -= 1
            if client is not None:
                self._client_counts[client] -= 1
                if not self._client_counts[client]:
                    del self._client_counts[client]

        return release
