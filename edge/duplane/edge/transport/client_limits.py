"""Limits of connections and sessions, in total and per client address."""

from __future__ import annotations

from collections import Counter
from enum import Enum, auto

# Further connections that an address may begin while it holds one with a credential. A bridge
# opens many connections at once, and each is known only after its first request.
_BEGUN_WITH_CREDENTIAL = 256


class LimitReached(Enum):
    """The limit that allows no further connection or session."""

    TOTAL = auto()
    CLIENT = auto()


class Permit:
    """Counts one connection or session, in total and for its client."""

    def __init__(self, limiter: ClientLimiter, client: str | None) -> None:
        self._limiter = limiter
        self._client = client
        self._is_exempt = client is None

    def exempt(self) -> None:
        """Count no longer for the client, only in total: the client has sent a credential."""
        if self._client is not None and not self._is_exempt:
            self._is_exempt = True
            _decrease(self._limiter.client_counts, self._client)
            self._limiter.exempt_counts[self._client] += 1

    def release(self) -> None:
        """Count no longer. Call this once."""
        self._limiter.count -= 1
        if self._client is not None:
            counts = self._limiter.exempt_counts if self._is_exempt else self._limiter.client_counts
            _decrease(counts, self._client)


class ClientLimiter:
    """Counts open and refused connections or sessions, in total and per client.

    For one thread only.
    """

    def __init__(self, total: int, per_client: int) -> None:
        self._total = total
        self._per_client = per_client
        self.count = 0
        self.refused_count = 0
        self.client_counts: Counter[str] = Counter()
        self.exempt_counts: Counter[str] = Counter()

    def acquire(self, client: str | None) -> Permit | LimitReached:
        """Count one more for `client`. Return its permit, or the limit reached.

        `client` None means that only the limit of the total applies: to a trusted proxy, which
        serves many clients, to a process of this machine, and to a client with a credential.
        """
        if self.count >= self._total:
            self.refused_count += 1
            return LimitReached.TOTAL
        if client is not None and self.client_counts[client] >= self._bound(client):
            self.refused_count += 1
            return LimitReached.CLIENT
        self.count += 1
        if client is not None:
            self.client_counts[client] += 1
        return Permit(self, client)

    def _bound(self, client: str) -> int:
        return self._per_client + (_BEGUN_WITH_CREDENTIAL if client in self.exempt_counts else 0)


def _decrease(counts: Counter[str], client: str) -> None:
    counts[client] -= 1
    if not counts[client]:
        del counts[client]
