"""Attachments of a recording: a comment, and video or audio that the client's page recorded.

All functions use the disk: call them in a thread. They raise OSError, or FileNotFoundError if the
recording was deleted meanwhile.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path

from duplane.fabric.files import part_path, write_atomically

MAX_COMMENT_CHARACTERS = 2000
_COMMENT = "comment.txt"
# File name of an upload by its content type. An upload replaces an earlier file of that name.
UPLOADS: Mapping[str, str] = {
    "video/webm": "frontend_replay.webm",
    "audio/webm": "frontend_replay.webm",
    "video/mp4": "frontend_replay.mp4",
    "audio/mp4": "frontend_replay.mp4",
    "audio/wav": "frontend_replay.wav",
    "audio/x-wav": "frontend_replay.wav",
}


class TooLargeError(Exception):
    """The upload exceeds its size limit."""


def write_comment(directory: Path, comment: str) -> None:
    """Replace the comment; an empty text deletes it."""
    path = directory / _COMMENT
    if comment:
        write_atomically(path, comment.encode())
    else:
        path.unlink(missing_ok=True)


def read_comment(directory: Path) -> str:
    """Return the comment; empty if there is none."""
    try:
        return (directory / _COMMENT).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""


class Upload:
    """One file that is being uploaded; it appears in the recording when it is complete.

    Thread-safe: a cancelled task may close the upload while a thread writes to it.
    """

    def __init__(self, directory: Path, name: str, max_bytes: int) -> None:
        self.size_bytes = 0
        self._path = directory / name
        self._part = part_path(self._path)
        self._max_bytes = max_bytes
        self._file: int | None = None
        self._is_closed = False
        self._lock = threading.Lock()

    def write(self, content: bytes) -> None:
        """Append to the file. Raises TooLargeError."""
        self.size_bytes += len(content)
        if self.size_bytes > self._max_bytes:
            raise TooLargeError
        with self._lock:
            if self._is_closed:
                return
            if self._file is None:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
                self._file = os.open(self._part, flags, 0o600)
            rest = memoryview(content)
            while rest:
                rest = rest[os.write(self._file, rest) :]

    def commit(self) -> None:
        """Give the complete file its final name in the recording."""
        with self._lock:
            if not self._is_closed:
                self._part.replace(self._path)

    def close(self) -> None:
        """Close the file; delete it unless it was committed."""
        with self._lock:
            self._is_closed = True
            if self._file is not None:
                os.close(self._file)
                self._file = None
            self._part.unlink(missing_ok=True)
