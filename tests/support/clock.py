"""A clock that a test sets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Clock:
    """A monotonic clock in seconds, for code that gets a function or the module `time`."""

    now_s: float = 36_077.123

    def __call__(self) -> float:
        return self.now_s

    def monotonic(self) -> float:
        return self.now_s
