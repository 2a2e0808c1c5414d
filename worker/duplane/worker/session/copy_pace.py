"""When a worker sends the next part of a copy to an edge that has attached."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable


class CopyPace:
    """Lets clients that return come before copies, which edges need only for later moves.

    If an edge is lost, its clients return within some seconds. Their copies would keep the event
    loops of the worker and of the other edges busy. So the worker sends no part of a copy until
    `quiet_s` after the last attach, except of a session that waits since `longest_s`. Then it sends
    one part in each turn of the event loop.
    """

    quiet_s = 1.0
    longest_s = 5.0

    def __init__(self) -> None:
        self._waiting: list[tuple[float, Callable[[], None]]] = []
        self._attached_s = -math.inf
        self._timer: asyncio.TimerHandle | None = None

    def attached(self) -> None:
        """Note that an edge has attached to a session, or takes one over."""
        self._attached_s = asyncio.get_running_loop().time()

    def ask(self, since_s: float, send: Callable[[], None]) -> None:
        """Call `send` once when a part may be sent to an edge that waits since `since_s`.

        The times are those of the event loop. The edge that waits longest is served first.
        """
        self._waiting.append((since_s, send))
        self._plan()

    def stop(self) -> None:
        """Call nothing any more, because the process ends."""
        self._waiting.clear()
        self._plan()

    def _due_s(self) -> float:
        oldest_s = min(since_s for since_s, _ in self._waiting)
        return min(self._attached_s + self.quiet_s, oldest_s + self.longest_s)

    def _plan(self) -> None:
        if self._timer:
            self._timer.cancel()
        if self._waiting:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(max(self._due_s(), loop.time()), self._turn)

    def _turn(self) -> None:
        longest = min(self._waiting, key=lambda one: one[0])
        is_due = self._due_s() <= asyncio.get_running_loop().time()
        if is_due:
            self._waiting.remove(longest)
        self._plan()
        if is_due:
            longest[1]()
