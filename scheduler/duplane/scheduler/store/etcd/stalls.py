"""The times in which etcd does not answer, which do not count for the claims of grants."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator

# If an operation takes this long, the store has not answered. Claims that arrived in time wait too.
STALL_S = 0.5
STUCK_S = 60.0  # an operation that waits this long is refused by itself, and others do not wait


class Stalls:
    """Notices operations that take at least `STALL_S`. Times are those of `clock`, in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.answers_since = -math.inf  # end of the last stall; no claim timeout begins before it
        self._clock = clock
        self._waiting_since: dict[object, float] = {}  # by operation

    @contextlib.contextmanager
    def noticed(self) -> Generator[None]:
        """Notice a stall if the body of the `with`, which is an operation, takes too long."""
        name = object()
        self._waiting_since[name] = self._clock()
        try:
            yield
        finally:
            now = self._clock()
            if now - self._waiting_since.pop(name) >= STALL_S:
                self.answers_since = now

    def look(self) -> None:
        """Notice a stall that lasts, by the operations that wait now."""
        now = self._clock()
        waited_s = (now - since for since in self._waiting_since.values())
        if any(STALL_S <= one < STUCK_S for one in waited_s):
            self.answers_since = now
