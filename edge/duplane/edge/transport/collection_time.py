"""CPU time of garbage collections, which the CPU quota of a client must not include."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Generator, Mapping
from typing import Any, Literal


class CollectionTime:
    """Counts the CPU time of the collections in the thread that creates it.

    A collection examines the objects of all sessions (100 ms with some hundred sessions), but it
    runs in the middle of whichever call makes the next object. Without this correction, the client
    whose message is read by this call would use up its quota, and the edge would read nothing from
    it for seconds.
    """

    def __init__(self) -> None:
        self.total_s = 0.0
        self._thread = threading.get_ident()
        self._began_s = 0.0

    @contextlib.contextmanager
    def counted(self) -> Generator[CollectionTime]:
        """Count during the body of the `with`."""
        gc.callbacks.append(self._on_collection)
        try:
            yield self
        finally:
            gc.callbacks.remove(self._on_collection)

    def _on_collection(self, phase: Literal["start", "stop"], info: Mapping[str, Any]) -> None:
        del info
        if threading.get_ident() != self._thread:
            return
        if phase == "start":
            self._began_s = time.thread_time()
        else:
            self.total_s += time.thread_time() - self._began_s
