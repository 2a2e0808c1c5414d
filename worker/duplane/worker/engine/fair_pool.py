"""A pool of threads that sessions share fairly, and the order of their work."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

R = TypeVar("R")
T = TypeVar("T")


class PoolFullError(Exception):
    """As much work waits as may wait. The new work is refused; other work is not affected."""


class FairOrder(Generic[T]):
    """The order in which the work of sessions runs. Pure.

    The next work is that of the session with the least running work; of several such sessions, the
    one that has waited the longest since its turn, or since it came. So no session runs more than
    its share while others wait. The work of one session runs in the order in which it came. At most
    `capacity` pieces wait.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._waiting: dict[Hashable, deque[T]] = {}  # in the order of the sessions' turns
        self._waiting_count = 0
        self._running: Counter[Hashable] = Counter()

    def put(self, session: Hashable, work: T) -> None:
        """Add work of a session. Raises PoolFullError."""
        if self._waiting_count >= self._capacity:
            raise PoolFullError(f"{self._capacity} pieces of work wait")
        self._waiting.setdefault(session, deque()).append(work)
        self._waiting_count += 1

    def take(self) -> tuple[Hashable, T] | None:
        """Remove the next work and return it with its session; None if no work waits.

        It counts as running until `done`.
        """
        if not self._waiting:
            return None
        session = min(self._waiting, key=self._running.__getitem__)
        waiting = self._waiting.pop(session)
        work = waiting.popleft()
        if waiting:
            self._waiting[session] = waiting
        self._waiting_count -= 1
        self._running[session] += 1
        return session, work

    def done(self, session: Hashable) -> None:
        """Note that some work of a session has ended."""
        self._running[session] -= 1
        if not self._running[session]:
            del self._running[session]

    def drop(self, session: Hashable) -> list[T]:
        """Remove the waiting work of a session and return it."""
        dropped = list(self._waiting.pop(session, ()))
        self._waiting_count -= len(dropped)
        return dropped

    def drop_all(self) -> list[T]:
        """Remove all waiting work and return it."""
        return [work for session in tuple(self._waiting) for work in self.drop(session)]


class FairPool:
    """A few threads that run the work of many sessions, in the order of `FairOrder`."""

    def __init__(self, thread_count: int, name: str, capacity: int) -> None:
        """Let at most `capacity` pieces of work wait. The threads start when work comes."""
        self._threads = ThreadPoolExecutor(thread_count, name)
        self._thread_count = thread_count
        self._lock = threading.Lock()
        self._order: FairOrder[tuple[Future[Any], Callable[[], Any]]] = FairOrder(capacity)
        self._active_count = 0  # threads that take work
        self._is_stopped = False

    def submit(self, session: Hashable, work: Callable[[], R]) -> Future[R]:
        """Run work of a session in a thread. Raises PoolFullError, RuntimeError after `stop`."""
        future: Future[R] = Future()
        with self._lock:
            if self._is_stopped:
                raise RuntimeError("the pool has stopped")
            self._order.put(session, (future, work))
            if self._active_count < self._thread_count:
                self._active_count += 1
                self._threads.submit(self._run)
        return future

    def drop(self, session: Hashable) -> None:
        """Cancel the work of a session that waits."""
        with self._lock:
            dropped = self._order.drop(session)
        for future, _ in dropped:
            future.cancel()

    def stop(self) -> None:
        """Cancel all work that waits, and refuse further work."""
        with self._lock:
            self._is_stopped = True
            dropped = self._order.drop_all()
        self._threads.shutdown(wait=False)
        for future, _ in dropped:
            future.cancel()

    def _run(self) -> None:
        """Run work until none waits."""
        while True:
            with self._lock:
                taken = self._order.take()
                if taken is None:
                    self._active_count -= 1
                    return
            session, (future, work) = taken
            try:
                if future.set_running_or_notify_cancel():
                    future.set_result(work())
            except Exception as error:  # noqa: BLE001 - the root of a thread; the caller gets the error
                future.set_exception(error)
            finally:
                with self._lock:
                    self._order.done(session)
