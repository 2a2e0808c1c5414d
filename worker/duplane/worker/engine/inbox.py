"""The inbox: the bounded queue of one conversation's units that wait for the device.

If the inbox is full, the oldest unit is dropped and counted. The order of the units never changes.
The inbox has no lock of its own: the device thread's lock guards it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from duplane.worker.engine.events import FailedUnit
from duplane.worker.engine.unit_record import UnitRecord

_UNIT_CAPACITY = 4
# The inbox holds at most this many answers to refused units. This bound is separate from that of
# units, so that many invalid units do not push out valid ones.
_FAILED_CAPACITY = 16

Entry = UnitRecord | FailedUnit


class Inbox:
    """A queue of units, and of answers to refused units at the positions of those units.

    `entries` holds the waiting entries, oldest first; `take` removes them. If a unit with
    `force_listen` is dropped, the next unit gets the flag, so that an interruption is never lost.
    """

    def __init__(self, capacity: int = _UNIT_CAPACITY) -> None:
        self._capacity = {UnitRecord: capacity, FailedUnit: _FAILED_CAPACITY}
        self.entries: deque[Entry] = deque()
        self.dropped_count = 0

    def put(self, entry: Entry) -> Entry | None:
        """Append an entry. If there are then too many of its type, drop and return the oldest."""
        self.entries.append(entry)
        entry_type = type(entry)
        alike = [waiting for waiting in self.entries if type(waiting) is entry_type]
        if len(alike) <= self._capacity[entry_type]:
            return None
        dropped, following = alike[:2]
        self.entries.remove(dropped)
        self.dropped_count += 1
        if isinstance(dropped, UnitRecord) and isinstance(following, UnitRecord):
            is_forced = dropped.unit.force_listen or following.unit.force_listen
            following.unit = replace(following.unit, force_listen=is_forced)
        return dropped

    def take(self) -> Entry:
        """Remove and return the oldest entry. A unit gets the number of entries dropped so far."""
        entry = self.entries.popleft()
        if isinstance(entry, UnitRecord):
            entry.dropped_count = self.dropped_count
        return entry

    def clear(self) -> None:
        """Drop all entries."""
        self.dropped_count += len(self.entries)
        self.entries.clear()
