"""A reader of the stream of events of an edge, as a page of an operator is one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

import aiohttp
import orjson
from support.time_limits import WITHIN_S

WATCH_PATH = "/api/admin/watch"


class WatchedStream:
    """The state that the events of one stream tell, and the events in their order."""

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self.answer = answer
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.state: dict[str, dict[str, dict[str, Any]]] = {}
        self.unavailable = ""
        self._text = b""

    async def next(self) -> tuple[str, dict[str, Any]] | None:
        """Return the next event, None at the end of the stream."""
        while b"\n\n" not in self._text:
            block = await self.answer.content.readany()
            if not block:
                return None
            self._text += block
        event, self._text = self._text.split(b"\n\n", 1)
        name, data = event.split(b"\n")
        fields = orjson.loads(data.removeprefix(b"data: "))
        self.events.append((name.removeprefix(b"event: ").decode(), fields))
        self._take(*self.events[-1])
        return self.events[-1]

    def _take(self, name: str, fields: dict[str, Any]) -> None:
        if name == "snapshot":
            self.state = {"workers": {}, "leases": {}, "tickets": {}}
            self.unavailable = ""
        if name == "unavailable":
            self.unavailable = fields["reason"]
        for kind, rows in self.state.items():
            key = f"{kind[:-1]}_id"
            rows.update({row[key]: row for row in fields.get(kind, ())})
            for gone in fields.get(f"removed_{kind}", ()):
                rows.pop(gone, None)

    async def until(self, is_true: Callable[[WatchedStream], object]) -> None:
        """Read until a condition is true."""
        async with asyncio.timeout(WITHIN_S):
            while not is_true(self):
                assert await self.next(), "the stream has ended"

    async def until_end(self) -> None:
        async with asyncio.timeout(WITHIN_S):
            while await self.next():
                pass


@contextlib.asynccontextmanager
async def watched(
    address: str, headers: Mapping[str, str] | None = None
) -> AsyncGenerator[WatchedStream]:
    """Open the stream."""
    async with (
        aiohttp.ClientSession() as client,
        client.get(f"http://{address}{WATCH_PATH}", headers=headers) as answer,
    ):
        yield WatchedStream(answer)
