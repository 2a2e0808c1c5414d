"""Pages of operators that are open beside the sessions: each reads the edge's stream of events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Self

import aiohttp

from duplane.tools.command import CommandError

_PATH = "/api/admin/watch"
_OPEN_TIMEOUT_S = 10.0


class OperatorPages:
    """The streams of open pages, and how many bytes they have read."""

    def __init__(self) -> None:
        self.byte_count = 0
        self.ended_count = 0  # streams that the edge has ended

    @classmethod
    @contextlib.asynccontextmanager
    async def reading(cls, edge_url: str, count: int) -> AsyncGenerator[Self]:
        """Read `count` streams of the edge during the body of the `with`.

        `edge_url` begins with ws. Raises CommandError if a stream is refused.
        """
        pages = cls()
        url = "http" + edge_url.removeprefix("ws") + _PATH
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_OPEN_TIMEOUT_S)
        async with contextlib.AsyncExitStack() as stack:
            client = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
            for _ in range(count):
                answer = await _opened(client, url)
                stack.callback(answer.close)
                reading = asyncio.create_task(pages._read(answer))
                stack.push_async_callback(_end, reading)
            yield pages

    async def _read(self, answer: aiohttp.ClientResponse) -> None:
        with contextlib.suppress(aiohttp.ClientError):
            while block := await answer.content.readany():
                self.byte_count += len(block)
        self.ended_count += 1


async def _opened(client: aiohttp.ClientSession, url: str) -> aiohttp.ClientResponse:
    try:
        async with asyncio.timeout(_OPEN_TIMEOUT_S):
            answer = await client.get(url)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise CommandError(f"the stream for operators was not opened: {error}") from None
    if answer.status != 200:
        answer.close()
        raise CommandError(f"the stream for operators was refused: status {answer.status}")
    return answer


async def _end(reading: asyncio.Task[None]) -> None:
    reading.cancel()
    await asyncio.wait({reading})
