"""The first moment of a connection: tells a WebSocket handshake from plain HTTP.

Reads no more than the head of the first request, gives the connection away and is then out of its
path: a WebSocket costs what it costs without HTTP beside it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import cast

ProtocolFactory = Callable[[], asyncio.Protocol]
MAX_HEAD_BYTES = 32 * 1024  # a longer one is left to HTTP, which refuses it

_END = b"\r\n\r\n"
_HTTP_2 = b"PRI "  # HTTP's parser waits for the rest of its preface, however long
_UPGRADE = re.compile(rb"(?im)^upgrade:[ \t]*websocket[ \t]*\r$")


class Front(asyncio.Protocol):
    """Holds one connection until its first request has told what it is.

    A client that does not tell within `within_s` is cut.
    """

    def __init__(
        self,
        undecided: set[Front],
        websocket: ProtocolFactory,
        http: ProtocolFactory,
        within_s: float,
    ) -> None:
        self._undecided = undecided
        self._websocket = websocket
        self._http = http
        self._within_s = within_s
        self._head = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are of no such class
        self._alarm = asyncio.get_running_loop().call_later(self._within_s, self.cut)
        self._undecided.add(self)

    def data_received(self, data: bytes) -> None:
        searched = max(0, len(self._head) - len(_END) + 1)
        self._head += data
        if self._head.startswith((b"\r", b"\n")):  # lines before a request count for nothing
            self._head = self._head.lstrip(b"\r\n")
            searched = 0
        if self._head.startswith(_HTTP_2):
            self.cut()
            return
        end = self._head.find(_END, searched)
        if end < 0 and len(self._head) < MAX_HEAD_BYTES:
            return
        is_upgrade = end >= 0 and _UPGRADE.search(self._head, 0, end + len(_END)) is not None
        self._give_to(self._websocket() if is_upgrade else self._http())

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._leave()

    def cut(self) -> None:
        """End the connection: nobody serves it any more."""
        self._transport.abort()

    def _give_to(self, protocol: asyncio.Protocol) -> None:
        self._leave()
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)
        protocol.data_received(bytes(self._head))

    def _leave(self) -> None:
        self._alarm.cancel()
        self._undecided.discard(self)
