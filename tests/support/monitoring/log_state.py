"""Undoes the changes of `configure_logging` in the test's process."""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import threading
from collections.abc import Iterator

from duplane.fabric.monitoring.logs import AUDIT, LEVEL_SIGNALS


@contextlib.contextmanager
def restored_logging() -> Iterator[None]:
    """At the end of the `with`, restore the loggers and the signal handlers of the log level."""
    root = logging.getLogger()
    ours = logging.getLogger("duplane")
    audit = logging.getLogger(AUDIT)
    levels = (root.level, ours.level, audit.level)
    handlers = list(root.handlers)
    hook = sys.excepthook
    signals = {number: signal.getsignal(number) for number in LEVEL_SIGNALS}
    try:
        yield
    finally:
        root.handlers[:] = handlers
        logging.captureWarnings(False)
        sys.excepthook = hook
        root.setLevel(levels[0])
        ours.setLevel(levels[1])
        audit.setLevel(levels[2])
        if threading.current_thread() is threading.main_thread():
            for number, former in signals.items():
                signal.signal(number, former)
