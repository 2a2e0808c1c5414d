"""Events on their way to one client: in order, bounded in bytes, one sender."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable


class OutboxFullError(Exception):
    """The client reads more slowly than it is answered."""


class Outbox:
    """A queue of rendered events. Full means closed: a reply with holes would be no reply."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._events: deque[bytes] = deque()
        self._held_bytes = 0
        self._is_finished = False
        self._news = asyncio.Event()

    def put(self, events: Iterable[bytes]) -> None:
        """Queue events. Raises OutboxFullError, having queued none of them."""
        added = list(events)
        added_bytes = sum(map(len, added))
        if self._held_bytes and self._held_bytes + added_bytes > self._limit_bytes:
            raise OutboxFullError
        self._events.extend(added)
        self._held_bytes += added_bytes
        self._news.set()

    def finish(self) -> None:
        """Say that nothing more will be queued; what is queued is still sent."""
        self._is_finished = True
        self._news.set()

    async def events(self) -> AsyncIterator[bytes]:
        """Yield events until `finish`; one counts as held until the next is asked for."""
        while True:
            while self._events:
                event = self._events.popleft()
                yield event
                self._held_bytes -= len(event)
            if self._is_finished:
                return
            self._news.clear()
            await self._news.wait()
