"""The first moment of a connection: counts it, and tells a WebSocket handshake from plain HTTP.

Reads no more than the head of the first request and gives the connection away. A WebSocket costs
what it costs without HTTP beside it; HTTP goes on through here, so that its time is bounded.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import cast

from duplane.edge.http.protocol import refused_head
from duplane.edge.patience import Patience
from duplane.edge.peers import Network, Peer, is_proxy
from duplane.edge.settings import Limits

WebSocketFactory = Callable[[Callable[[], None]], asyncio.Protocol]
HttpFactory = Callable[[], asyncio.Protocol]
MAX_HEAD_BYTES = 32 * 1024  # of the first request; a longer one is refused

_END = b"\r\n\r\n"
_HTTP_2 = b"PRI "  # HTTP's parser waits for the rest of its preface, however long
_TOO_LONG = refused_head(
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    f"the head of a request must be at most {MAX_HEAD_BYTES} bytes",
)
_UPGRADE = re.compile(rb"(?im)^upgrade:[ \t]*websocket[ \t]*\r$")


class Door:
    """Who is connected, by client address; and who may still come in."""

    def __init__(self, limits: Limits, proxies: Sequence[Network]) -> None:
        self.limits = limits
        self.undecided: set[Front] = set()
        self._proxies = proxies
        self._count = 0
        self._sites: Counter[str] = Counter()

    def enter(self, address: str) -> Callable[[], None] | None:
        """Count a connection; return what must be called when it is lost. None: there is no room.

        A proxy that is trusted speaks for many, and is bounded by the whole.
        """
        site = "" if is_proxy(address, self._proxies) else Peer(address, is_local=False).site
        if self._count >= self.limits.connection_count:
            return None
        if site and self._sites[site] >= self.limits.client_connection_count:
            return None
        self._count += 1
        self._sites[site] += 1

        def leave() -> None:
            self._count -= 1
            self._sites[site] -= 1
            if not self._sites[site]:
                del self._sites[site]

        return leave


class Front(asyncio.Protocol):
    """Holds one connection until its first request has told what it is; HTTP until its end.

    A client that does not tell in time, or does not read its answer, is cut.
    """

    def __init__(self, door: Door, websocket: WebSocketFactory, http: HttpFactory) -> None:
        self._door = door
        self._websocket = websocket
        self._new_http = http
        self._http: asyncio.Protocol | None = None
        self._leave: Callable[[], None] | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._head = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are of no such class
        limits = self._door.limits
        self._patience = Patience(self._transport, limits.send_s)
        self._alarm = self._cut_after(limits.handshake_s)
        peer: Sequence[str] | None = transport.get_extra_info("peername")
        self._leave = self._door.enter(peer[0] if peer else "")
        if self._leave is None:
            self.cut()
        else:
            self._door.undecided.add(self)

    def data_received(self, data: bytes) -> None:
        if self._http:
            self._http.data_received(data)
            return
        searched = max(0, len(self._head) - len(_END) + 1)
        self._head += data
        if self._head.startswith((b"\r", b"\n")):  # lines before a request count for nothing
            self._head = self._head.lstrip(b"\r\n")
            searched = 0
        if self._head.startswith(_HTTP_2):
            self.cut()
            return
        end = self._head.find(_END, searched)
        if end < 0:
            if len(self._head) > MAX_HEAD_BYTES:
                self._refuse_head()
            return
        is_upgrade = _UPGRADE.search(self._head, 0, end + len(_END)) is not None
        self._door.undecided.discard(self)
        if self._alarm:
            self._alarm.cancel()
            self._alarm = None
        if is_upgrade:
            self._become_websocket()
        else:
            self._serve_http()

    def eof_received(self) -> bool | None:
        return self._http.eof_received() if self._http else None

    def pause_writing(self) -> None:
        """Wait for the client to read its answer; making one may have taken as long as it may."""
        self._patience.begin()
        if self._alarm is None:
            self._alarm = self._cut_after(self._door.limits.http_s)
        if self._http:
            self._http.pause_writing()

    def resume_writing(self) -> None:
        self._patience.end()
        if self._http:
            self._http.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._alarm:
            self._alarm.cancel()
        self._patience.end()
        self._door.undecided.discard(self)
        if self._leave:
            self._leave()
        if self._http:
            self._http.connection_lost(exc)

    def cut(self) -> None:
        """End the connection: nobody serves it any more."""
        self._transport.abort()

    def _refuse_head(self) -> None:
        """Answer, and close once that is read; until then the alarm goes on."""
        self._head.clear()
        if not self._transport.is_closing():
            self._transport.write(_TOO_LONG)
            self._transport.close()

    def _cut_after(self, seconds: float) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(seconds, self.cut)

    def _become_websocket(self) -> None:
        assert self._leave
        websocket = self._websocket(self._leave)
        self._transport.set_protocol(websocket)
        websocket.connection_made(self._transport)
        websocket.data_received(bytes(self._head))

    def _serve_http(self) -> None:
        self._http = self._new_http()
        self._http.connection_made(self._transport)
        self._http.data_received(bytes(self._head))
