"""Event loops on virtual time: they never sleep, but move their clocks to the next timer."""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple

Answer = TypeVar("Answer")
Arguments = TypeVarTuple("Arguments")

# The time of a host that has run for ten hours; sums with such a time are rounded.
_LONG_UPTIME_S = 36_077.123
_EARLY_S, _LATE_S = 0.0005, 0.002  # a timer fires up to this much before or after its time
_LOOK_S = 1e-6  # time that passes at each look at the clock


class DeadlockError(Exception):
    """Raised if all tasks wait and no timer is left that could wake one of them."""


class _JumpingSelector(selectors.DefaultSelector):
    """Advances the clock of its loop instead of waiting."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise DeadlockError("every task waits for another one")
        self.now += max(0.0, timeout)
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """The time of this loop starts at 0 and passes only while every task waits for a timer.

    It derives from asyncio's loop, because uvloop has no selector that could be replaced.
    """

    def __init__(self) -> None:
        self._clock = _JumpingSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


class LifelikeLoop(VirtualTimeLoop):
    """A loop with the inaccuracies of real ones.

    Its timers fire a little early or late, as those of uvloop do. Some time passes at each look at
    the clock, so code that looks twice sees two times. The time starts at a large odd value.
    """

    def __init__(self) -> None:
        self._chance = random.Random(0)
        super().__init__()
        self._clock.now = _LONG_UPTIME_S

    def time(self) -> float:
        self._clock.now += _LOOK_S
        return self._clock.now

    def call_at(
        self,
        when: float,
        callback: Callable[[*Arguments], object],
        *args: *Arguments,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        due = when + self._chance.uniform(-_EARLY_S, _LATE_S)
        return super().call_at(due, callback, *args, context=context)


def run(
    main: Coroutine[Any, Any, Answer], loop: Callable[[], VirtualTimeLoop] = VirtualTimeLoop
) -> Answer:
    """Run a coroutine on virtual time."""
    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(main)
