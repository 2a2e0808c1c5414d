"""What sessions need prepared beside the device: frames decoded, voices read, chats laid out.

Decides in which threads that runs, and how it stops with its session: a session that has ended
keeps its slot until no thread works for it any more. So no more than a few calls of each slot wait
or run, and clients that come and leave cannot pile them up.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

R = TypeVar("R")


class AbandonedError(Exception):
    """Nobody waits for this work any more; it stops where it is."""


class Threads:
    """The threads of one worker; each kind of work has its own, so that no kind delays another."""

    def __init__(self) -> None:
        self.frames = ThreadPoolExecutor(4, "frames")  # a running conversation waits for them
        self.voices = ThreadPoolExecutor(2, "voices")
        self.chats = ThreadPoolExecutor(2, "chats")

    def stop(self) -> None:
        """Begin nothing more."""
        for pool in (self.frames, self.voices, self.chats):
            pool.shutdown(wait=False, cancel_futures=True)


class Preparation:
    """What is prepared for one session. For the event loop, but for `check`."""

    def __init__(self) -> None:
        self._is_over = threading.Event()
        self._begun: list[Future[Any]] = []

    def check(self) -> None:
        """Raise AbandonedError if the session has ended: for work to call between its steps."""
        if self._is_over.is_set():
            raise AbandonedError

    async def run(self, pool: ThreadPoolExecutor, work: Callable[[], R]) -> R:
        """Do `work` in a thread. When cancelled, a step of it may still run; see `end`."""
        self.check()
        future = pool.submit(work)
        self._begun = [begun for begun in self._begun if not begun.done()] + [future]
        return await asyncio.wrap_future(future)

    async def end(self) -> None:
        """Stop the work at its next step and return when no thread is left with it."""
        self._is_over.set()
        left = [asyncio.wrap_future(begun) for begun in self._begun if not begun.cancel()]
        await asyncio.gather(*left, return_exceptions=True)
        self._begun = []
