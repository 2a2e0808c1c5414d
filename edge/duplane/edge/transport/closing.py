"""How a WebSocket is closed: if the client may be sending, the edge waits before it closes.

A client that sends to a closed socket gets an error instead of the last events. So after some
close reasons the connection stays open for a while, and the client can close it itself.
"""

from __future__ import annotations

import asyncio
import contextlib

from aiohttp import WSCloseCode, WSMsgType, web

from duplane.edge.close import LINGERING, Close

_MAX_CLOSE_REASON_BYTES = 123  # RFC 6455, 5.5
_MAX_CLOSE_CODE = 4999  # RFC 6455, 7.4.2


async def linger(reading: asyncio.Task[None], close: Close, linger_s: float) -> None:
    """If the client may be sending (`LINGERING`), wait until it closes. Then stop reading."""
    if close.reason in LINGERING:
        await asyncio.wait({reading}, timeout=linger_s)
    reading.cancel()
    await asyncio.wait({reading})


class ClosingResponse(web.WebSocketResponse):
    """Keeps the connection open after a frame that breaks the protocol.

    aiohttp would close the connection immediately. A client that is still sending would then get
    a reset, and could not read the close code.
    """

    has_sent_close = False  # no other frame may follow the close frame

    async def close(
        self, *, code: int = WSCloseCode.OK, message: bytes = b"", drain: bool = True
    ) -> bool:
        """After an error of the client, only send the close frame. aiohttp calls this method."""
        if code == WSCloseCode.OK:
            return await super().close(code=code, message=message, drain=drain)
        self.has_sent_close = True
        with contextlib.suppress(ConnectionError):
            await self.send_frame(code.to_bytes(2, "big") + message, WSMsgType.CLOSE)
        return True

    async def finish(self, code: int, reason: str) -> None:
        """Send a close frame, and wait at most `timeout` for the client's close frame."""
        self.has_sent_close = True
        await super().close(code=code, message=cut_reason(reason).encode())


def echoed_code(code: int) -> int:
    """Return the code that answers a client's close frame; `code` is 0 if that frame has none.

    aiohttp refuses other invalid codes, but neither those that are too high nor 1006, which no
    frame may have.
    """
    if code == WSCloseCode.ABNORMAL_CLOSURE or code > _MAX_CLOSE_CODE:
        return WSCloseCode.PROTOCOL_ERROR
    return code or WSCloseCode.OK


def cut_reason(reason: str) -> str:
    """Return a close reason, shortened to the length that a close frame can hold."""
    return reason.encode()[:_MAX_CLOSE_REASON_BYTES].decode(errors="ignore")
