"""The queue of events that wait for a client's connection: in order, bounded in bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class OutboxFullError(Exception):
    """The queue is full: the client reads too slowly."""


class Outbox:
    """Rendered events that wait. If it overflows, the connection must be closed.

    Events are never dropped: a reply with missing parts would be useless.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._events: deque[bytes] = deque()
        self._queued_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._events)

    def put(self, events: Iterable[bytes]) -> None:
        """Queue all events, or none. Raises OutboxFullError."""
        added = list(events)
        added_bytes = sum(map(len, added))
        if self._queued_bytes and self._queued_bytes + added_bytes > self._limit_bytes:
            raise OutboxFullError
        self._events.extend(added)
        self._queued_bytes += added_bytes

    def pop(self) -> bytes:
        """Remove and return the oldest event."""
        event = self._events.popleft()
        self._queued_bytes -= len(event)
        return event

    def clear(self) -> None:
        """Remove all events."""
        self._events.clear()
        self._queued_bytes = 0
