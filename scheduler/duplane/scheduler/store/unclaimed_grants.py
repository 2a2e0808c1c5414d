"""The deadlines by which grants must be claimed."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from duplane.scheduler.store.base import Grant

SlotKey = tuple[str, int]  # worker id, slot


class ClaimDeadlines:
    """A heap of deadlines. An entry is skipped if its grant was claimed or has ended."""

    def __init__(self, find_grant: Callable[[SlotKey], Grant | None]) -> None:
        self._find_grant = find_grant
        self._heap: list[tuple[float, int, SlotKey]] = []

    def add(self, grant: Grant, deadline: float) -> None:
        """Set the deadline of a new grant."""
        key = (grant.claims.worker_id, grant.claims.slot)
        heapq.heappush(self._heap, (deadline, grant.claims.fencing_number, key))

    def pop_expired(self, now: float) -> Iterator[Grant]:
        """Yield each grant that is still unclaimed at its deadline. The caller ends the grants."""
        while (grant := self._first()) and self._heap[0][0] <= now:
            heapq.heappop(self._heap)
            yield grant

    def next_in_s(self, now: float) -> float | None:
        """Return the seconds to the next deadline, or None if no grant is unclaimed."""
        return self._heap[0][0] - now if self._first() else None

    def _first(self) -> Grant | None:
        """Return the unclaimed grant with the soonest deadline; drop the entries before it."""
        while self._heap:
            _, fencing_number, key = self._heap[0]
            grant = self._find_grant(key)
            if grant and grant.claims.fencing_number == fencing_number and not grant.is_claimed:
                return grant
            heapq.heappop(self._heap)
        return None
