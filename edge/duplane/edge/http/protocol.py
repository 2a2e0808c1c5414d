"""What speaks HTTP on one connection, and refuses in JSON, too, what never becomes a request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import orjson
from aiohttp import web
from aiohttp.web_protocol import RequestHandler

_DETAILS = {HTTPStatus.INTERNAL_SERVER_ERROR: "internal error"}
_UNREADABLE = "the request cannot be read"


def http_protocols(server: web.Server, **settings: Any) -> Callable[[], asyncio.Protocol]:
    """Return what makes the protocol of a connection; `settings` are those of the handlers."""
    return lambda: _JsonHandler(server, loop=asyncio.get_running_loop(), **settings)


def refused_head(status: HTTPStatus, detail: str) -> bytes:
    """Return a whole answer to a request of which only a part was read."""
    body = orjson.dumps({"detail": detail})
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + body


class _JsonHandler(RequestHandler):
    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = HTTPStatus.INTERNAL_SERVER_ERROR,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what could not be read, or what has failed in a way that is our own fault."""
        super().handle_error(request, status, exc, message)  # for its log
        body = orjson.dumps({"detail": _DETAILS.get(HTTPStatus(status), _UNREADABLE)})
        answer = _Unnamed(body=body, status=status, content_type="application/json")
        answer.force_close()
        return answer


class _Unnamed(web.Response):
    """Says nothing of what the edge is made of: no hook of the application is asked here."""

    async def _prepare_headers(self) -> None:
        await super()._prepare_headers()
        self.headers.popall("Server", None)
