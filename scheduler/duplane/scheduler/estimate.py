"""How long a ticket will wait, guessed from how long slots were held lately. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from duplane.fabric.v1 import lease_pb2

# Before enough was seen: what the public service that these protocols come from assumes.
BASE_S: dict[lease_pb2.SessionKind, float] = {
    lease_pb2.SESSION_KIND_AUDIO_DUPLEX: 120.0,
    lease_pb2.SESSION_KIND_OMNI_DUPLEX: 90.0,
    lease_pb2.SESSION_KIND_CHAT: 15.0,
}
SMOOTHING = 0.3
SAMPLES_NEEDED = 3
OVERDUE_S = 15.0  # what a session that has outrun its estimate is thought to hold on still


class HoldTimes:
    """How long slots are held, per kind of session: a moving average once it is founded."""

    def __init__(self) -> None:
        self.base_s = dict(BASE_S)
        self.smoothing = SMOOTHING
        self._mean_s: dict[lease_pb2.SessionKind, float] = {}
        self._sample_count: dict[lease_pb2.SessionKind, int] = {}

    def add(self, kind: lease_pb2.SessionKind, held_s: float) -> None:
        """Count a slot that was held for `held_s`."""
        mean_s = self._mean_s.get(kind, held_s)
        self._mean_s[kind] = mean_s + self.smoothing * (held_s - mean_s)
        self._sample_count[kind] = self.sample_count(kind) + 1

    def mean_s(self, kind: lease_pb2.SessionKind) -> float | None:
        """Return the moving average of a kind; None before the first sample."""
        return self._mean_s.get(kind)

    def sample_count(self, kind: lease_pb2.SessionKind) -> int:
        """Return how many sessions of a kind were counted."""
        return self._sample_count.get(kind, 0)

    def expected_s(self, kind: lease_pb2.SessionKind) -> float:
        """Return how long a session of the kind holds its slot; a kind untold is the longest."""
        if kind not in self.base_s:
            return max(self.expected_s(known) for known in self.base_s)
        if self.sample_count(kind) < SAMPLES_NEEDED:
            return self.base_s[kind]
        return self._mean_s[kind]

    def remaining_s(self, kind: lease_pb2.SessionKind, held_s: float) -> float:
        """Return how long a session that has held its slot for `held_s` will hold it still."""
        remaining_s = self.expected_s(kind) - held_s
        return remaining_s if remaining_s > 0 else OVERDUE_S


@dataclass(frozen=True, slots=True)
class Outlook:
    """A slot: what it serves, and in how many seconds it is thought to be free."""

    kinds: frozenset[lease_pb2.SessionKind]
    free_in_s: float


def waits_s(
    kinds: Iterable[lease_pb2.SessionKind], slots: Iterable[Outlook], times: HoldTimes
) -> Sequence[float | None]:
    """Return the wait of each ticket of one pool, next first; None where no slot will serve it.

    Plays the queue through: each ticket takes the slot of its kind that is free first, never
    before the one ahead of it, and holds it for as long as its kind does.
    """
    free: dict[frozenset[lease_pb2.SessionKind], list[float]] = {}
    for slot in slots:
        free.setdefault(slot.kinds, []).append(slot.free_in_s)
    for times_s in free.values():
        heapq.heapify(times_s)
    waits: list[float | None] = []
    ahead_s = 0.0
    for kind in kinds:
        able = [times_s for served, times_s in free.items() if kind in served]
        if not able:
            waits.append(None)
            continue
        first = min(able, key=lambda times_s: times_s[0])
        ahead_s = max(ahead_s, first[0])
        heapq.heapreplace(first, ahead_s + times.expected_s(kind))
        waits.append(ahead_s)
    return waits
