"""One page that reads the stream of events, and the bound of what it has not read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from duplane.edge.access import Caller

MAX_UNREAD_BYTES = 1024 * 1024


class Reader:
    """The unread events of one page.

    `snapshot` returns the events with which a page begins. A page that has more than
    MAX_UNREAD_BYTES unread gets these instead: it misses no state, only steps in between.
    """

    def __init__(self, caller: Caller, snapshot: Callable[[], bytes]) -> None:
        self.caller = caller
        self._snapshot = snapshot
        self._unread: list[bytes] = []
        self._unread_bytes = 0
        self._is_behind = True
        self._is_over = False
        self._news = asyncio.Event()
        self._news.set()

    def push(self, events: bytes) -> None:
        """Add events."""
        if self._is_behind:
            return
        self._unread.append(events)
        self._unread_bytes += len(events)
        if self._unread_bytes > MAX_UNREAD_BYTES:
            self.start_again()
        self._news.set()

    def start_again(self) -> None:
        """Let the next events be a snapshot."""
        self._is_behind = True
        self._unread.clear()
        self._unread_bytes = 0
        self._news.set()

    def end(self) -> None:
        """End the stream; what is unread is dropped."""
        self._is_over = True
        self._news.set()

    async def read(self) -> bytes:
        """Wait for events and return them; empty at the end of the stream."""
        await self._news.wait()
        self._news.clear()
        if self._is_over:
            self._news.set()
            return b""
        if self._is_behind:
            events = self._snapshot()
            self._is_behind = False
            return events
        events = b"".join(self._unread)
        self._unread.clear()
        self._unread_bytes = 0
        return events
