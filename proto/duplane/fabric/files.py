"""Writes files atomically: to a temporary file in the same folder, which is then renamed.

So a reader never sees an incomplete file. Files are not synced to the disk. So a power failure may
destroy both the old and the new content.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Generator
from pathlib import Path

PART_SUFFIX = ".part"  # at the end of the names of unfinished files, which readers skip


def part_path(path: Path) -> Path:
    """Return a new hidden path in the same folder, for the next content of `path`."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{PART_SUFFIX}")


@contextlib.contextmanager
def replacing(path: Path) -> Generator[Path]:
    """Yield the path of a new file to write. At the end of the `with`, this file replaces `path`.

    Only the user of this process can read the file, because such files can have private content.
    If the body raises an error, the new file is deleted and `path` is unchanged.
    """
    part = part_path(path)
    try:
        part.touch(mode=0o600, exist_ok=False)
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes) -> None:
    """Replace the content of `path`. If this raises OSError, `path` is unchanged."""
    with replacing(path) as part:
        part.write_bytes(content)
