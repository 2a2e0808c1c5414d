"""One thread that runs jobs in order, so that the event loop never waits for a disk."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

_log = logging.getLogger(__name__)

Job = Callable[[], object]


class SerialExecutor:
    """Runs jobs one after another. The queue has no bound of its own: its callers bound their jobs.

    The thread is a daemon, so that the process can end while a disk hangs.
    """

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue `job` after all earlier jobs."""
        self._jobs.put(job)

    def close(self, timeout_s: float) -> None:
        """Run the queued jobs and end the thread, but wait at most `timeout_s`."""
        self._jobs.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            _log.error("%s: the disk is too slow; the queued jobs are dropped", self._thread.name)

    def _loop(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:  # noqa: BLE001 - the root of a thread
                _log.exception("%s: a job failed", self._thread.name)
