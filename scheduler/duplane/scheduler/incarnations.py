"""The names of worker processes that callers may know."""

from __future__ import annotations

import functools
import hashlib

_CONTEXT = b"duplane incarnation\0"
_LENGTH = 16  # hexadecimal digits: enough to distinguish the processes of one worker id


@functools.lru_cache(maxsize=16_384)
def public_incarnation(incarnation: str) -> str:
    """Return the name of a worker process for callers.

    The incarnation itself is a secret: with it, a process takes a registration over.
    """
    return hashlib.sha256(_CONTEXT + incarnation.encode()).hexdigest()[:_LENGTH]
