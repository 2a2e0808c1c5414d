"""The wall-clock time of this machine."""

from __future__ import annotations

import time


def now_s() -> float:
    """Return the seconds since 1970."""
    return time.time_ns() / 1e9


def now_ms() -> int:
    """Return the milliseconds since 1970."""
    return time.time_ns() // 1_000_000
