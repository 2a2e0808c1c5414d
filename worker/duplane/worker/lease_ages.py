"""Computes the least possible age of a lease, from its fencing number and a monotonic clock. Pure.

Fencing numbers rise with every grant in a fabric. At intervals, the scheduler sends the worker the
highest number so far. A lease with this number or a lower one was granted before the message
arrived. So no wall clock is needed, and a wrong wall clock does not affect the age of a lease.
"""

from __future__ import annotations

from collections import deque

_MARK_INTERVAL_S = 2.0
# A mark is the highest fencing number at one time. 64 marks span at least 124 s, because all but
# the last are at least 2 s apart. A lease stays claimable for at most 90 s. For a lease that is
# older than the oldest kept mark, `age_s` returns the age of that mark.
_MARKS_KEPT = 64
_REGISTRATIONS_KEPT = 64  # leases of earlier registrations have expired
_EVERY_NUMBER = 2**63


class _Registration:
    """One registration of the worker, with marks: the highest fencing number at certain times."""

    def __init__(self, epoch: int, now: float) -> None:
        self.epoch = epoch
        self._marks = deque([(epoch, now)], maxlen=_MARKS_KEPT)  # numbers and times, both rising

    def mark(self, number: int, now: float) -> None:
        """Add a mark, unless the last mark is younger than `_MARK_INTERVAL_S`."""
        last_number, last_time = self._marks[-1]
        if number == _EVERY_NUMBER or (
            number > last_number and now >= last_time + _MARK_INTERVAL_S
        ):
            self._marks.append((number, now))

    def age_s(self, number: int, now: float) -> float:
        """Return the least age of the lease with this number, or 0 if all marks are lower."""
        return next((now - at for reached, at in self._marks if reached >= number), 0.0)


class LeaseAges:
    """The ages of leases that were granted under the registrations of one worker process."""

    def __init__(self) -> None:
        self._registrations: deque[_Registration] = deque(maxlen=_REGISTRATIONS_KEPT)
        self._is_attached = False

    def register(self, epoch: int, now: float) -> None:
        """Begin a registration and end the present one, unless the epoch is unchanged."""
        if self._is_attached and self._registrations[-1].epoch == epoch:
            return
        self.detach(now)
        self._registrations.append(_Registration(epoch, now))
        self._is_attached = True

    def progress(self, number: int, now: float) -> None:
        """Record that fencing numbers have risen to `number`."""
        if self._is_attached:
            self._registrations[-1].mark(number, now)

    def detach(self, now: float) -> None:
        """End the present registration, if there is one.

        The scheduler may notice the end later and still grant leases until then. The age of these
        leases is counted from now.
        """
        if self._is_attached:
            self._registrations[-1].mark(_EVERY_NUMBER, now)
        self._is_attached = False

    def age_s(self, epoch: int, number: int, now: float) -> float | None:
        """Return the least age of a lease, or None if its registration is unknown."""
        found = (one for one in reversed(self._registrations) if one.epoch == epoch)
        registration = next(found, None)
        return registration.age_s(number, now) if registration else None
