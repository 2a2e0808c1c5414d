"""The inbox: the bounded queue of one conversation's units that wait for the device.

If it is full, the oldest unit is dropped and counted. The order never changes. The inbox has no
lock of its own: the device thread's lock guards it.
"""

from __future__ import annotations

from collections import deque

from duplane.worker.engine.events import FailedUnit
from duplane.worker.model.types import Unit

_UNIT_CAPACITY = 4
# The inbox holds at most this many answers to refused units. This bound is separate from that of
# units, so that many invalid units do not push out valid ones.
_FAILED_CAPACITY = 16

Entry = Unit | FailedUnit


class Inbox:
    """A queue of units, and of answers to refused units at the positions of those units.

    `entries` holds the waiting entries, oldest first; only the methods change it. If a unit with
    `force_listen` is dropped, the next unit gets the flag, so that an interruption is never lost.
    """

    def __init__(self, capacity: int = _UNIT_CAPACITY) -> None:
        self._capacity = {Unit: capacity, FailedUnit: _FAILED_CAPACITY}
        self.entries: deque[Entry] = deque()
        self._must_listen = False
        self.dropped_count = 0

    def put(self, entry: Entry) -> Entry | None:
        """Append an entry. If there are too many of its type, drop and return the oldest one."""
        self.entries.append(entry)
        entry_type = type(entry)
        alike = [waiting for waiting in self.entries if type(waiting) is entry_type]
        if len(alike) > self._capacity[entry_type]:
            self.entries.remove(alike[0])
            self._count_dropped(alike[0])
            return alike[0]
        return None

    def take(self) -> Entry | None:
        """Remove and return the oldest entry. A unit gets the number of entries dropped so far."""
        if not self.entries:
            return None
        entry = self.entries.popleft()
        if isinstance(entry, Unit):
            entry.dropped_count = self.dropped_count
            entry.force_listen |= self._must_listen
            self._must_listen = False
        return entry

    def clear(self) -> None:
        """Drop all entries."""
        while self.entries:
            self._count_dropped(self.entries.popleft())

    def _count_dropped(self, entry: Entry) -> None:
        self.dropped_count += 1
        self._must_listen |= isinstance(entry, Unit) and entry.force_listen
