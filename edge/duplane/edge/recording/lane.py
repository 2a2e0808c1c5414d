"""One thread that does jobs in order, so that whoever asks for them never waits for a disk."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

_log = logging.getLogger(__name__)

Job = Callable[[], object]


class Lane:
    """Jobs are not bounded here: those who put them bound what they hold.

    The thread is a daemon: a disk that hangs does not keep the process from ending.
    """

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, job: Job) -> None:
        """Have `job` done after all that were put before."""
        self._jobs.put(job)

    def close(self, timeout_s: float) -> None:
        """Do what was put and end; what is not done within `timeout_s` may stay undone."""
        self._jobs.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            _log.error(
                "%s: the disk does not keep up; giving up on what is left", self._thread.name
            )

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:  # noqa: BLE001 - the root of a thread
                _log.exception("%s: a job failed", self._thread.name)
