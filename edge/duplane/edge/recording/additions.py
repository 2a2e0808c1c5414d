"""What people add to a recording afterwards: a comment, and what their own page has recorded.

Everything here works on the disk: call it from a thread. All of it raises OSError; a recording
that is swept away meanwhile is FileNotFoundError.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Mapping
from pathlib import Path

MAX_COMMENT_CHARACTERS = 2000
_COMMENT = "comment.txt"
# Where an upload goes, by its content type: one of each kind, a second takes the first one's place.
UPLOADS: Mapping[str, str] = {
    "video/webm": "frontend_replay.webm",
    "audio/webm": "frontend_replay.webm",
    "video/mp4": "frontend_replay.mp4",
    "audio/mp4": "frontend_replay.mp4",
    "audio/wav": "frontend_replay.wav",
    "audio/x-wav": "frontend_replay.wav",
}


class TooLargeError(Exception):
    """An upload is above its bound."""


def write_comment(directory: Path, comment: str) -> None:
    """Replace the comment; an empty one is none."""
    path = directory / _COMMENT
    if not comment:
        path.unlink(missing_ok=True)
        return
    part = directory / f".{_COMMENT}.{secrets.token_hex(4)}.part"
    part.write_text(comment, encoding="utf-8")
    part.replace(path)


def read_comment(directory: Path) -> str:
    """Return the comment, empty where there is none."""
    try:
        return (directory / _COMMENT).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""


class Upload:
    """One file on its way to a recording: seen there once it is whole.

    Its owner may be cancelled while a thread writes: it is closed after that, and takes no more.
    """

    def __init__(self, directory: Path, name: str, max_bytes: int) -> None:
        self.size_bytes = 0
        self._path = directory / name
        self._part = directory / f".{name}.{secrets.token_hex(4)}.part"
        self._max_bytes = max_bytes
        self._file: int | None = None
        self._is_over = False
        self._lock = threading.Lock()

    def write(self, content: bytes) -> None:
        """Add what has come. Raises TooLargeError."""
        self.size_bytes += len(content)
        if self.size_bytes > self._max_bytes:
            raise TooLargeError
        with self._lock:
            if self._is_over:
                return
            if self._file is None:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
                self._file = os.open(self._part, flags, 0o600)
            rest = memoryview(content)
            while rest:
                rest = rest[os.write(self._file, rest) :]

    def keep(self) -> None:
        """Put the whole file in its place."""
        with self._lock:
            if not self._is_over:
                self._part.replace(self._path)

    def close(self) -> None:
        """Let go of it; what was not kept is deleted."""
        with self._lock:
            self._is_over = True
            if self._file is not None:
                os.close(self._file)
                self._file = None
            self._part.unlink(missing_ok=True)
