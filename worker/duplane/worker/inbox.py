"""What waits for one conversation's turn on the device: bounded, newest wins, nothing reordered.

The only place where a unit may be dropped. Knows no thread; its owner holds a lock around it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from duplane.fabric.audio import Samples
from duplane.fabric.v1.trace_pb2 import TraceContext

UNITS_KEPT = 4
_REFUSALS_KEPT = 16  # answers owed for bad units; a flood of garbage pushes out only garbage


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """A unit that was found good. `received_s` is monotonic, `receive_time_ns` the wall clock."""

    sequence: int
    audio: Samples
    force_listen: bool
    received_s: float
    receive_time_ns: int
    trace: TraceContext | None = None
    frames: tuple[bytes, ...] = ()
    max_slices: int = 1


@dataclass(frozen=True, slots=True)
class Refusal:
    """The answer owed for a unit that was found bad, given when its turn comes."""

    sequence: int
    reason: str
    message: str
    field: str = ""
    receive_time_ns: int = 0
    trace: TraceContext | None = None


Entry = Unit | Refusal


class Inbox:
    """A queue of entries. Units beyond `capacity` push out the oldest unit, which is counted.

    A dropped unit's `force_listen` passes to the next unit, so that an interruption is never lost.
    """

    def __init__(self, capacity: int = UNITS_KEPT) -> None:
        self._capacity = {Unit: capacity, Refusal: _REFUSALS_KEPT}
        self._entries: deque[Entry] = deque()
        self._must_listen = False
        self.dropped_count = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, entry: Entry) -> None:
        """Add the newest entry."""
        self._entries.append(entry)
        kind = type(entry)
        alike = [waiting for waiting in self._entries if type(waiting) is kind]
        if len(alike) > self._capacity[kind]:
            self._entries.remove(alike[0])
            self._count_dropped(alike[0])

    def take(self) -> Entry | None:
        """Remove and return the oldest entry."""
        if not self._entries:
            return None
        entry = self._entries.popleft()
        if isinstance(entry, Unit) and self._must_listen:
            self._must_listen = False
            return replace(entry, force_listen=True)
        return entry

    def clear(self) -> None:
        """Drop everything that waits."""
        while self._entries:
            self._count_dropped(self._entries.popleft())

    def _count_dropped(self, entry: Entry) -> None:
        self.dropped_count += 1
        self._must_listen |= isinstance(entry, Unit) and entry.force_listen
