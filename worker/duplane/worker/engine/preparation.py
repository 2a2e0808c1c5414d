"""Work on the CPU that comes before the work on the device: pictures, voices, chat prompts.

Each type of work has its own thread pool. When a session ends, its work stops, and its slot is
freed only when no thread works for the session any more. So only a few pieces of work wait or run
for each slot, even if clients come and leave quickly.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from duplane.worker.engine.events import FailedUnit, failed_unit
from duplane.worker.engine.unit_record import UnitRecord
from duplane.worker.models.interface import Preparer
from duplane.worker.models.types import UnitFailure

R = TypeVar("R")


class AbandonedError(Exception):
    """The session has ended, so this work stops."""


class ThreadPools:
    """The thread pools of one worker. No type of work delays another, as each has its own pool."""

    def __init__(self) -> None:
        self.frames = ThreadPoolExecutor(4, "frames")  # running conversations wait for these
        self.voices = ThreadPoolExecutor(2, "voices")
        self.chats = ThreadPoolExecutor(2, "chats")

    def stop(self) -> None:
        """Refuse further work."""
        for pool in (self.frames, self.voices, self.chats):
            pool.shutdown(wait=False, cancel_futures=True)


class Preparation:
    """The preparing work of one session. All methods but `check` are for the event loop."""

    def __init__(self) -> None:
        self._is_over = threading.Event()
        self._started: list[Future[Any]] = []

    def check(self) -> None:
        """Raise AbandonedError if the session has ended. The work calls this between its steps."""
        if self._is_over.is_set():
            raise AbandonedError

    async def run(self, pool: ThreadPoolExecutor, work: Callable[[], R]) -> R:
        """Run `work` in a thread. After a cancellation the current step of `work` may still run."""
        self.check()
        future = pool.submit(work)
        self._started = [work for work in self._started if not work.done()] + [future]
        return await asyncio.wrap_future(future)

    async def end(self) -> None:
        """Stop the work before its next step. Return when no thread runs any of it."""
        self._is_over.set()
        running = [asyncio.wrap_future(work) for work in self._started if not work.cancel()]
        await asyncio.gather(*running, return_exceptions=True)
        self._started = []


def prepare_unit(preparer: Preparer, record: UnitRecord) -> UnitRecord | FailedUnit:
    """Prepare the unit of a record. Return the record, or the answer that refuses the unit.

    A unit without pictures takes microseconds; a picture takes some milliseconds.
    """
    prepared = preparer.unit(record.unit)
    if isinstance(prepared, UnitFailure):
        return failed_unit(record, prepared)
    record.unit = prepared
    return record
