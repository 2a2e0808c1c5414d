"""Where the edge's time comes from."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from duplane.edge.dialects.dialect import Moment


class Alarm(Protocol):
    """A call that is due later."""

    def cancel(self) -> None:
        """Forget it."""
        ...


class Clock(Protocol):
    """Tells the time, and calls when it has come."""

    def now(self) -> Moment:
        """Read it."""
        ...

    def call_at(self, monotonic_s: float, callback: Callable[[], None]) -> Alarm:
        """Call `callback` when `Moment.monotonic_s` has come to this."""
        ...


class LoopClock:
    """The running loop's time for durations, the wall's for people."""

    def now(self) -> Moment:
        """Read both."""
        return Moment(asyncio.get_running_loop().time(), time.time_ns())

    def call_at(self, monotonic_s: float, callback: Callable[[], None]) -> Alarm:
        """Call `callback` when the loop's time has come to this."""
        return asyncio.get_running_loop().call_at(monotonic_s, callback)
