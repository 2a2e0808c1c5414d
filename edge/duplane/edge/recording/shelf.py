"""Recordings as they lie on disk: names, meta, events, and which of them still run."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import orjson

META = "meta.json"
STREAM = "stream.jsonl"
BLOBS = "blob"
USER = "user.wav"  # 16 kHz
MODEL = "model.wav"  # 24 kHz
REPLAY = "replay.wav"  # both, stereo: the user left, the model right

_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]")


@dataclass(slots=True)
class Meta:
    """What is known of a recording. Times are Unix seconds; no keys, no addresses of clients.

    `ended_at` is absent while it runs. Incomplete are recordings that lost events, to a full
    queue or disk, or their end.
    """

    session_id: str
    path: str  # of the client's URL
    mode: str
    created_at: float
    identity: dict[str, str] = field(default_factory=dict[str, str])
    dialect: str | None = None
    worker: str | None = None
    ended_at: float | None = None
    duration_s: float | None = None
    close_reason: str | None = None
    is_incomplete: bool = False
    lost_event_count: int = 0
    error: str | None = None


def is_name(name: str) -> bool:
    """Tell whether a recording can be called so."""
    return _NAME.fullmatch(name) is not None


def safe_name(name: str) -> str:
    """Make a name of any text."""
    return _UNSAFE.sub("_", name)[:128] or "_"


def write_meta(directory: Path, meta: Meta) -> None:
    """Replace the meta of a recording; a reader sees the old or the new. Raises OSError."""
    part = directory / f"{META}.part"
    part.write_bytes(orjson.dumps(asdict(meta), option=orjson.OPT_INDENT_2))
    part.replace(directory / META)


def read_meta(directory: Path) -> Meta | None:
    """Return the meta of a recording, None when there is none that can be read."""
    try:
        known: dict[str, Any] = orjson.loads((directory / META).read_bytes())
        names = {each.name for each in fields(Meta)}
        return Meta(**{name: value for name, value in known.items() if name in names})
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def read_events(directory: Path) -> Iterator[dict[str, Any]]:
    """Yield the timeline, oldest first; a last line that was cut short is left out.

    Raises OSError.
    """
    with (directory / STREAM).open("rb") as stream:
        for line in stream:
            try:
                yield orjson.loads(line)
            except orjson.JSONDecodeError:
                return


def recordings(root: Path) -> list[Path]:
    """Return the directories of all recordings, in no order; none where there is no root."""
    try:
        entries = list(root.iterdir())
    except OSError:
        return []
    return [entry for entry in entries if is_name(entry.name) and is_recording(entry)]


def is_recording(directory: Path) -> bool:
    """Tell whether this is the directory of a recording; links are not followed to one."""
    return not directory.is_symlink() and (directory / STREAM).is_file()


def lock(file: int) -> None:
    """Mark a file as being written, as long as it stays open; a recording by its stream.

    The mark goes with the process, however it ends.
    """
    fcntl.flock(file, fcntl.LOCK_EX)


def is_running(directory: Path) -> bool:
    """Tell whether any process on this host is still recording here."""
    return is_locked(directory / STREAM)


def is_locked(path: Path) -> bool:
    """Tell whether any process on this host is still writing a file; not one that is gone."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(file)
    return False


def size_bytes(directory: Path) -> int:
    """Return what a recording holds; files that vanish meanwhile count nothing."""
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.lstat().st_size
        except OSError:
            continue
    return total
