"""Lists that are sent in pages.

A page ends with a key, which is the token of the next page: that page has the items with higher
keys. So if an item ends between two pages, no other item is left out or repeated.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from typing import Generic, TypeVar

from google.protobuf.message import Message

Item = TypeVar("Item")
Status = TypeVar("Status", bound=Message)

PAGE_LENGTH = 1000  # maximum number of items of a page
PAGE_BYTES = 4 * 1024 * 1024  # a page ends with the item that reaches this size
_PORTION = 64  # items that are described before other tasks can run
_KEY_PORTION = 1024  # keys that are made before other tasks can run
_KEYS_AGE_S = 30.0  # keys of a first page are used for the pages after it for this time


class Pages(Generic[Item, Status]):
    """One list. Its sorted keys are made for the first page and kept for the pages after it."""

    def __init__(
        self,
        items: Callable[[], Collection[Item]],
        key_of: Callable[[Item], str],
        describe: Callable[[str], Status | None],
    ) -> None:
        """`describe` returns None if the item with a key has ended."""
        self._items = items
        self._key_of = key_of
        self._describe = describe
        self._keys: Sequence[str] = ()
        self._made_at = float("-inf")

    async def page(self, page_size: int, token: str) -> tuple[Sequence[Status], str]:
        """Return the items of one page, and the token of the next page.

        The token is empty on the last page.
        """
        keys = await self._sorted_keys(is_first=not token)
        length = min(page_size or PAGE_LENGTH, PAGE_LENGTH)
        found: list[Status] = []
        size = 0
        start = bisect_right(keys, token)
        for index in range(start, len(keys)):
            if len(found) == length or size >= PAGE_BYTES:
                return found, keys[index - 1]
            if (index - start) % _PORTION == 0:
                await asyncio.sleep(0)
            if status := self._describe(keys[index]):
                found.append(status)
                size += status.ByteSize()
        return found, ""

    async def _sorted_keys(self, *, is_first: bool) -> Sequence[str]:
        now = asyncio.get_running_loop().time()
        if is_first or now - self._made_at > _KEYS_AGE_S:
            keys: list[str] = []
            for index, item in enumerate(list(self._items())):
                if index % _KEY_PORTION == 0:
                    await asyncio.sleep(0)
                keys.append(self._key_of(item))
            keys.sort()
            self._keys = keys
            self._made_at = now
            return keys
        return self._keys
