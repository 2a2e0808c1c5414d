"""The edge's clock: monotonic time for durations and timers, wall time for timestamps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol


class Moment(NamedTuple):
    """One instant, in monotonic and in wall time. The pure parts of the edge get it as argument."""

    monotonic_s: float
    wall_ns: int

    @property
    def wall_s(self) -> float:
        """Unix time in seconds."""
        return self.wall_ns / 1e9


class Timer(Protocol):
    """A scheduled call that can be cancelled."""

    def cancel(self) -> None:
        """Cancel the call."""
        ...


class Clock(Protocol):
    """Returns the time and schedules calls. Tests use a clock that they advance themselves."""

    def now(self) -> Moment:
        """Return the current time."""
        ...

    def call_at(self, monotonic_s: float, callback: Callable[[], None]) -> Timer:
        """Call `callback` when the monotonic time is `monotonic_s` or later, never earlier."""
        ...


# uvloop rounds a delay to a whole number of milliseconds and compares floats, so a timer may fire
# up to half a millisecond early.
_ROUNDING_S = 0.001


class LoopClock:
    """The running event loop's monotonic time and the system's wall time."""

    def __init__(self) -> None:
        # The loop is kept, because each `get_running_loop` is a system call in Python 3.11.
        self._loop = asyncio.get_running_loop()

    def now(self) -> Moment:
        """Return the current time."""
        return Moment(self._loop.time(), time.time_ns())

    def call_at(self, monotonic_s: float, callback: Callable[[], None]) -> Timer:
        """Schedule `callback` on the event loop, at most about 2 ms late."""
        return self._loop.call_at(monotonic_s + _ROUNDING_S, callback)
