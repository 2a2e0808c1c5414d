"""An event loop whose clock differs from the monotonic clock."""

from __future__ import annotations

import asyncio


class SleptLoop(asyncio.SelectorEventLoop):
    """A loop like uvloop on a Mac that has slept: its clock is ahead of `time.monotonic`.

    It derives from asyncio's loop, because the clock of uvloop cannot be changed.
    """

    def time(self) -> float:
        return super().time() + 36_077.123
