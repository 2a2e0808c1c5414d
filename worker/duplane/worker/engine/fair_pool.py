"""A pool of threads that does the work of many sessions in the order in which it came."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

R = TypeVar("R")


class PoolFullError(Exception):
    """As much work waits as may wait. The new work is refused; other work is not affected."""


class FairPool:
    """A few threads. Sessions share them fairly if each has one piece of work in it at a time."""

    def __init__(self, thread_count: int, name: str, capacity: int) -> None:
        """Let at most `capacity` pieces of work wait. The threads start when work comes."""
        self._threads = ThreadPoolExecutor(thread_count, name)
        self._thread_count = thread_count
        self._capacity = capacity
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Hashable, Future[Any], Callable[[], Any]]] = deque()
        self._active_count = 0  # threads that take work
        self._is_stopped = False

    def submit(self, session: Hashable, work: Callable[[], R]) -> Future[R]:
        """Run work of a session in a thread. Raises PoolFullError, RuntimeError after `stop`."""
        future: Future[R] = Future()
        with self._lock:
            if self._is_stopped:
                raise RuntimeError("the pool has stopped")
            if len(self._waiting) >= self._capacity:
                raise PoolFullError(f"{self._capacity} pieces of work wait")
            self._waiting.append((session, future, work))
            if self._active_count < self._thread_count:
                self._active_count += 1
                self._threads.submit(self._run)
        return future

    def drop(self, session: Hashable) -> None:
        """Cancel the work of a session that waits."""
        with self._lock:
            dropped = [piece for piece in self._waiting if piece[0] == session]
            for piece in dropped:
                self._waiting.remove(piece)
        for _, future, _ in dropped:
            future.cancel()

    def stop(self) -> None:
        """Cancel all work that waits, and refuse further work."""
        with self._lock:
            self._is_stopped = True
            dropped, self._waiting = self._waiting, deque()
        self._threads.shutdown(wait=False)
        for _, future, _ in dropped:
            future.cancel()

    def _run(self) -> None:
        """Run work until none waits."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._active_count -= 1
                    return
                _, future, work = self._waiting.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except Exception as error:  # noqa: BLE001 - the root of a thread; the caller gets the error
                future.set_exception(error)
