"""Time limits of one session, and the close reason of each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum, auto

from duplane.edge.clock import Moment
from duplane.edge.close import GONE, SESSION_OVER, Close, CloseReason


class TimeLimit(Enum):
    """The time limits of a session.

    `Limits` has the duration of each limit except WHOLE_SESSION, which `Mode` has, and COPY.
    """

    SCHEDULER = auto()  # until a scheduler answers
    SLOT = auto()  # in the queue
    SETTINGS = auto()  # from `queue_done` to valid settings
    GRACE = auto()  # from the first append, or from later settings, until they are complete
    CONVERSATION = auto()  # until the worker opens a conversation or sends the next delta
    AUDIO = auto()  # since the last audio, or since the last turn
    COPY = auto()  # until all past units of a session that another edge had have come
    HOLD = auto()  # while a session without a socket keeps its slot
    RETURN = auto()  # until the client of a session without a socket is back
    REFUSAL = auto()  # while a client without a slot may still return to its session
    DRAIN = auto()  # while a client that waits may go to another edge
    CLAIM = auto()  # while a granted slot is kept for a turn
    WHOLE_SESSION = auto()  # from `queue_done`


# How a session is closed when one of these limits has passed. For all other limits the subclass of
# `Session` decides.
EXPIRED: Mapping[TimeLimit, Close] = {
    TimeLimit.SCHEDULER: Close(CloseReason.SERVICE_UNAVAILABLE, "no scheduler answers"),
    TimeLimit.SLOT: Close(CloseReason.WORKER_BUSY, "no worker became free in time"),
    TimeLimit.SETTINGS: Close(CloseReason.TIMEOUT, "no session settings in time"),
    TimeLimit.AUDIO: Close(CloseReason.TIMEOUT, "no audio for too long"),
    TimeLimit.RETURN: GONE,
    TimeLimit.DRAIN: Close(CloseReason.SHUTDOWN),
    TimeLimit.WHOLE_SESSION: SESSION_OVER,
}


class TimeLimits:
    """Deadlines in monotonic seconds. `next_deadline` is the earliest one, or infinity."""

    def __init__(self) -> None:
        self.next_deadline = math.inf
        self._deadlines: dict[TimeLimit, float] = {}

    def start(self, limit: TimeLimit, seconds: float, now: Moment) -> None:
        """Start a limit, or start it again."""
        self._deadlines[limit] = now.monotonic_s + seconds
        self.next_deadline = min(self._deadlines.values())

    def stop(self, *limits: TimeLimit) -> None:
        """Stop limits, running or not."""
        for limit in limits:
            self._deadlines.pop(limit, None)
        self.next_deadline = min(self._deadlines.values(), default=math.inf)

    def is_running(self, limit: TimeLimit) -> bool:
        """Return whether a limit has been started and not stopped."""
        return limit in self._deadlines

    def left_s(self, limit: TimeLimit, now: Moment) -> float | None:
        """Return the seconds until a limit has passed; None if it does not run or never passes."""
        left_s = self._deadlines.get(limit, math.inf) - now.monotonic_s
        return left_s if math.isfinite(left_s) else None

    def clear(self) -> None:
        """Stop all limits."""
        self._deadlines.clear()
        self.next_deadline = math.inf

    def expired(self, now: Moment) -> list[TimeLimit]:
        """Return the limits whose deadline has passed. Does not stop these limits."""
        return [limit for limit, at in self._deadlines.items() if at <= now.monotonic_s]
