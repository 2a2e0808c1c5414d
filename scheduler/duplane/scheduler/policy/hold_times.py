"""Estimates how long sessions hold their slots, from sessions that ended lately. Pure."""

from __future__ import annotations

from duplane.fabric.v1 import lease_pb2

# The expected hold times of a kind until `MIN_SAMPLE_COUNT` of its sessions have ended. The values
# are the defaults of the public service whose protocols the edge serves.
BASE_S: dict[lease_pb2.SessionKind, float] = {
    lease_pb2.SESSION_KIND_AUDIO_DUPLEX: 120.0,
    lease_pb2.SESSION_KIND_OMNI_DUPLEX: 90.0,
    lease_pb2.SESSION_KIND_CHAT: 15.0,
}
SMOOTHING = 0.3
MIN_SAMPLE_COUNT = 3
OVERDUE_S = 15.0  # expected remaining time of a session that has outlasted its estimate


class HoldTimes:
    """The expected hold time of each kind: a base value at first, later an average of sessions."""

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
        """Return the average hold time of a kind; None if no session of the kind has ended yet."""
        return self._mean_s.get(kind)

    def sample_count(self, kind: lease_pb2.SessionKind) -> int:
        """Return how many sessions of a kind were counted."""
        return self._sample_count.get(kind, 0)

    def expected_s(self, kind: lease_pb2.SessionKind) -> float:
        """Return the expected hold time of a kind; for an unknown kind, the longest known one."""
        if kind not in self.base_s:
            return max(self.expected_s(known) for known in self.base_s)
        if self.sample_count(kind) < MIN_SAMPLE_COUNT:
            return self.base_s[kind]
        return self._mean_s[kind]

    def remaining_s(self, kind: lease_pb2.SessionKind, held_s: float) -> float:
        """Return the expected remaining time of a session that has held its slot for `held_s`."""
        remaining_s = self.expected_s(kind) - held_s
        return remaining_s if remaining_s > 0 else OVERDUE_S
