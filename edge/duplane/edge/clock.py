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


_SHORTEST_S = 0.001  # uvloop rounds shorter delays to 0


class _Alarm:
    """Calls a function at a monotonic time or later, never earlier.

    The timers of a loop may fire early: uvloop rounds delays to milliseconds. A loop may also have
    another clock: on macOS, only uvloop's clock runs while the machine sleeps.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, due_s: float, callback: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._due_s = due_s
        self._callback = callback
        self._set(due_s - time.monotonic())

    def _set(self, left_s: float) -> None:
        self._timer = self._loop.call_later(max(left_s, _SHORTEST_S), self._fired)

    def _fired(self) -> None:
        if (left_s := self._due_s - time.monotonic()) > 0:
            self._set(left_s)
        else:
            self._callback()

    def cancel(self) -> None:
        """Cancel the call."""
        self._timer.cancel()


class LoopClock:
    """The system's monotonic time and wall time. The running event loop makes the calls."""

    def __init__(self) -> None:
        # The loop is kept, because each `get_running_loop` is a system call in Python 3.11.
        self._loop = asyncio.get_running_loop()

    def now(self) -> Moment:
        """Return the current time."""
        return Moment(time.monotonic(), time.time_ns())

    def call_at(self, monotonic_s: float, callback: Callable[[], None]) -> Timer:
        """Schedule `callback` on the event loop, at most about 2 ms late."""
        return _Alarm(self._loop, monotonic_s, callback)
