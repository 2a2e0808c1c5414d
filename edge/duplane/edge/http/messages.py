"""What every answer over HTTP is made of, and how the body of a request is read within bounds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import TypeVar, cast

import orjson
from aiohttp import web

_Answer = TypeVar("_Answer", bound=web.StreamResponse)
Json = dict[str, object]

_JSON = "application/json"
_PIECE_BYTES = 64 * 1024


def json_answer(body: object, status: int = HTTPStatus.OK) -> web.Response:
    """Answer with JSON; bytes are JSON already."""
    content = body if isinstance(body, bytes) else orjson.dumps(body)
    # Written in pieces, a long one is not copied for a client that does not read it.
    told = _pieces(content) if len(content) > _PIECE_BYTES else content
    length = {"Content-Length": str(len(content))}
    answer = web.Response(body=told, status=status, headers=length, content_type=_JSON)
    return closing(answer)


async def _pieces(content: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(content), _PIECE_BYTES):
        yield content[at : at + _PIECE_BYTES]


def closing(answer: _Answer) -> _Answer:
    """Answer once per connection: a proxy must not send a WebSocket over a used one."""
    answer.force_close()
    return answer


async def read_body(request: web.Request, max_bytes: int, within_s: float) -> bytes:
    """Return the body. Raises HTTPException: 413 above `max_bytes`, 408 when it does not come."""
    body = bytearray()
    if (request.content_length or 0) > max_bytes:
        raise web.HTTPRequestEntityTooLarge(max_bytes, request.content_length or 0)
    try:
        async with asyncio.timeout(within_s):
            async for piece in request.content.iter_any():
                body += piece
                if len(body) > max_bytes:
                    raise web.HTTPRequestEntityTooLarge(max_bytes, len(body))
    except TimeoutError:
        raise web.HTTPRequestTimeout(text="the request took too long") from None
    return bytes(body)


def read_object(body: bytes) -> Json:
    """Return the JSON object that a body holds. Raises HTTPException: 400, or 422."""
    try:
        told: object = orjson.loads(body)
    except orjson.JSONDecodeError:
        raise web.HTTPBadRequest(text="the body is no JSON") from None
    if not isinstance(told, dict):
        raise web.HTTPUnprocessableEntity(text="the body must be an object")
    return cast(Json, told)
