"""Names refused clients in the log of a server, which gRPC does not tell."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import NoReturn

from cachetools import LRUCache

_log = logging.getLogger(__name__)

# A client calls as soon as it is connected. gRPC itself ends a handshake only after 20 s or more.
_CALL_WITHIN_S = 10.0
_CHECK_INTERVAL_S = 5.0
_LOGGED_AGAIN_S = 3600.0
_MAX_OPEN = 4096  # more handshakes at the same time are not counted
_MAX_PEERS = 16_384  # of more addresses, those that called least recently are forgotten


class Handshakes:
    """Pairs the handshakes of a server with the first calls of new connections.

    gRPC tells a server when a handshake begins, but neither who begins it nor how it ends. So a
    connection without a call is counted, and logged at most once an hour.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun = deque[float](maxlen=_MAX_OPEN)
        self._peers = LRUCache[str, bool](_MAX_PEERS)
        self._lost_count = 0  # since the last line in the log
        self._due = 0.0

    def begin(self) -> None:
        """Note that a handshake begins. gRPC calls this in a thread of its own."""
        self._begun.append(self._clock())

    def note_call(self, peer: str) -> None:
        """Note a call from an address of a client."""
        if peer in self._peers:
            self._peers[peer] = True  # the least recently used one is forgotten first
            return
        self._peers[peer] = True
        if self._begun:
            self._begun.popleft()

    async def run(self) -> NoReturn:
        """Look for connections without a call, until cancelled."""
        while True:
            await asyncio.sleep(_CHECK_INTERVAL_S)
            self.check()

    def check(self) -> None:
        """Count the connections that have made no call in time, and log them."""
        now = self._clock()
        while self._begun and self._begun[0] <= now - _CALL_WITHIN_S:
            self._begun.popleft()
            self._lost_count += 1
        if self._lost_count and now >= self._due:
            _log.warning(
                "connections without a call: %d. Their TLS handshake has failed (a client without a"
                " certificate, with one that is expired or of another CA, or without TLS; or the"
                " client has refused this server), or they were no clients of the fabric",
                self._lost_count,
            )
            self._lost_count, self._due = 0, now + _LOGGED_AGAIN_S
