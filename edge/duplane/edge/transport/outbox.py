"""The queue of events not yet written to a client's connection: in order, bounded in bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable


class OutboxFullError(Exception):
    """The queue is full: the client reads too slowly."""


class Outbox:
    """A queue of rendered events. If it overflows, the connection must be closed.

    Events are never dropped: a reply with missing parts would be useless.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        # Each event, with the function to call when it is written.
        self._events: deque[tuple[bytes, Callable[[], None] | None]] = deque()
        self._queued_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._events)

    def put(self, events: Iterable[bytes], on_written: Callable[[], None] | None = None) -> None:
        """Queue all events, or none. Raises OutboxFullError."""
        added = list(events)
        added_bytes = sum(map(len, added))
        if self._queued_bytes and self._queued_bytes + added_bytes > self._limit_bytes:
            raise OutboxFullError
        self._events.extend((event, None) for event in added[:-1])
        self._events.extend((event, on_written) for event in added[-1:])
        self._queued_bytes += added_bytes

    def pop(self) -> tuple[bytes, Callable[[], None] | None]:
        """Remove and return the oldest event, and the function to call when it is written."""
        event, on_written = self._events.popleft()
        self._queued_bytes -= len(event)
        return event, on_written

    def clear(self) -> None:
        """Remove all events."""
        self._events.clear()
        self._queued_bytes = 0
