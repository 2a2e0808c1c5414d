"""The time limit of waits in tests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

WITHIN_S = 30.0
"""Limit of a wait for something that comes immediately on an idle machine.

It only ends a test that hangs, so it leaves a loaded machine enough time. It is shorter than the
intervals after which a process would notice a missing message by itself: the edge closes a silent
client after 40 s, and a harness sets longer intervals where the default is shorter.
"""


async def until(is_true: Callable[[], Awaitable[bool]], within_s: float) -> None:
    """Poll until `is_true()`; raise TimeoutError after `within_s`."""
    deadline = time.monotonic() + within_s
    while not await is_true():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not true within {within_s} s")
        await asyncio.sleep(0.02)
