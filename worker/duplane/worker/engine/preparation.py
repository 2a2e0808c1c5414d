"""Work on the CPU that comes before the work on the device: pictures, voices, chat prompts.

Each type of work has its own pool of threads, which sessions share fairly. A unit is prepared in
steps of one picture, so a unit of many pictures delays the units of other sessions by one picture
for each thread at most. When a session ends, its work stops, and its slot is freed only when no
thread works for the session any more. So only a few pieces of work wait or run for each slot, even
if clients come and leave quickly.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

R = TypeVar("R")

_CAPACITY = 1024  # pieces of work that wait in a pool; a session has one at a time


class AbandonedError(Exception):
    """The session has ended, so this work stops."""


class PoolFullError(Exception):
    """As much work waits as may wait. The new work is refused; other work is not affected."""


class FairPool:
    """A few threads that do work in its order. Sessions with one piece each have equal shares."""

    def __init__(self, thread_count: int, name: str, capacity: int = _CAPACITY) -> None:
        """Let at most `capacity` pieces of work wait. The threads start when work comes."""
        self._threads = ThreadPoolExecutor(thread_count, name)
        self._places = threading.Semaphore(thread_count + capacity)

    def submit(self, work: Callable[[], R]) -> Future[R]:
        """Run work in a thread. Raises PoolFullError, RuntimeError after `stop`."""
        if not self._places.acquire(blocking=False):
            raise PoolFullError
        held = [work]
        try:
            future = self._threads.submit(lambda: held.pop()())
        except RuntimeError:  # stopped, or no thread can be started
            held.clear()
            self._places.release()
            raise

        def leave(_: Future[R]) -> None:
            held.clear()  # the threads keep what was cancelled until they come to it
            self._places.release()

        future.add_done_callback(leave)
        return future

    def stop(self) -> None:
        """Cancel all work that waits, and refuse further work."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class ThreadPools:
    """The thread pools of one worker. No type of work delays another, as each has its own pool."""

    def __init__(self) -> None:
        self.frames = FairPool(4, "frames")  # running conversations wait for these
        self.voices = FairPool(2, "voices")
        self.chats = FairPool(2, "chats")

    def stop(self) -> None:
        """Refuse further work."""
        for pool in (self.frames, self.voices, self.chats):
            pool.stop()


class Preparation:
    """The preparing work of one session. All methods but `check` are for the event loop."""

    def __init__(self) -> None:
        self._is_over = threading.Event()
        self._turn = asyncio.Lock()  # one piece of work at a time: `FairPool` relies on it
        self._started: list[Future[Any]] = []

    def check(self) -> None:
        """Raise AbandonedError if the session has ended. The work calls this between its steps."""
        if self._is_over.is_set():
            raise AbandonedError

    async def run(self, pool: FairPool, work: Callable[[], R]) -> R:
        """Run `work` in a thread. After a cancellation the current step of `work` may still run.

        Raises PoolFullError.
        """
        async with self._turn:
            self.check()
            future = pool.submit(work)
            unfinished = [started for started in self._started if not started.done()]
            self._started = [*unfinished, future]
            return await asyncio.wrap_future(future)

    async def run_steps(self, pool: FairPool, steps: Generator[None, None, R]) -> R:
        """Run each step of `steps` like a `work` of its own; return what the last step returns.

        Work of other sessions may run between the steps. Raises PoolFullError.
        """
        returned: list[R] = []

        def step() -> None:
            try:
                next(steps)
            except StopIteration as stop:
                returned.append(stop.value)

        while not returned:
            await self.run(pool, step)
        return returned[0]

    async def end(self) -> None:
        """Drop the work that waits. Return when no thread runs any work of the session."""
        self._is_over.set()
        running = [asyncio.wrap_future(work) for work in self._started if not work.cancel()]
        await asyncio.gather(*running, return_exceptions=True)
        self._started = []
