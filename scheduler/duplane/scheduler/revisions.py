"""The unit of revisions, and the bounds of the numbers that callers and workers may name. Pure.

Epochs, orders and fencing numbers are revisions. They begin with the wall-clock time of the store's
start, in milliseconds shifted by `BITS_PER_MS`. No store makes a million changes in a millisecond,
so the numbers of a later start are higher.
"""

from __future__ import annotations

BITS_PER_MS = 20
_DAY_MS = 86_400_000
# The longest run of a scheduler whose callers keep their places when it restarts without its queue.
# The orders of a run begin with the time of its start, so they do not show when a ticket was added.
_LONGEST_RUN_MS = 90 * _DAY_MS


def at(wall_ms: int) -> int:
    """Return the revision of a store that starts at this wall-clock time."""
    return wall_ms << BITS_PER_MS


def fencing_limit(revision: int, wall_ms: int) -> int:
    """Return the highest fencing number that a worker may report to a store at `revision`.

    A worker that comes from another store reports a number of that store, whose clock may be ahead
    of this one by a day. The limit does not rise with reported numbers, so no number of reports
    lifts the revision by more than a day.
    """
    return max(revision, at(wall_ms + _DAY_MS))


def is_of_former_run(order: int, first: int) -> bool:
    """True if `order` may be of the run before the one whose orders began at `first`."""
    return 0 < first - order <= at(_LONGEST_RUN_MS)
