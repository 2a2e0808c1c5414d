"""HTTP messages: JSON answers, and request bodies read within bounds of size and time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import TypeVar, cast

import orjson
from aiohttp import web

_Response = TypeVar("_Response", bound=web.StreamResponse)
Json = dict[str, object]

_JSON = "application/json"
_BLOCK_BYTES = 64 * 1024


def json_answer(body: object, status: int = HTTPStatus.OK) -> web.Response:
    """Return a JSON answer. A body of type bytes must be JSON."""
    content = body if isinstance(body, bytes) else orjson.dumps(body)
    # A long body is written block by block. So if a client does not read, the write buffer does not
    # hold a whole copy of the body.
    payload = _blocks(content) if len(content) > _BLOCK_BYTES else content
    length = {"Content-Length": str(len(content))}
    answer = web.Response(body=payload, status=status, headers=length, content_type=_JSON)
    return closing(answer)


async def _blocks(content: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(content), _BLOCK_BYTES):
        yield content[at : at + _BLOCK_BYTES]


def closing(answer: _Response) -> _Response:
    """Close the connection after this answer, so that no proxy reuses it for a WebSocket."""
    answer.force_close()
    return answer


async def read_body(request: web.Request, max_bytes: int, within_s: float) -> bytes:
    """Return the body. Raises HTTPException: 413 above `max_bytes`, 408 after `within_s`."""
    body = bytearray()
    if (request.content_length or 0) > max_bytes:
        raise web.HTTPRequestEntityTooLarge(max_bytes, request.content_length or 0)
    try:
        async with asyncio.timeout(within_s):
            async for block in request.content.iter_any():
                body += block
                if len(body) > max_bytes:
                    raise web.HTTPRequestEntityTooLarge(max_bytes, len(body))
    except TimeoutError:
        raise web.HTTPRequestTimeout(text="the request took too long") from None
    return bytes(body)


def read_object(body: bytes) -> Json:
    """Return the JSON object in a body. Raises HTTPException: 400, or 422."""
    try:
        fields: object = orjson.loads(body)
    except orjson.JSONDecodeError:
        raise web.HTTPBadRequest(text="the body is not JSON") from None
    if not isinstance(fields, dict):
        raise web.HTTPUnprocessableEntity(text="the body must be an object")
    return cast(Json, fields)
