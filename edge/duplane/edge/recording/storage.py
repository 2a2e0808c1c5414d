"""The files of recordings on disk: names, meta, events, and the locks of running recordings."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from duplane.fabric.files import write_atomically

META = "meta.json"
STREAM = "stream.jsonl"
BLOBS = "blob"
USER = "user.wav"
MODEL = "model.wav"
REPLAY = "replay.wav"  # stereo: the user on the left, the model on the right

_DELETED = ".deleted-"  # no recording's name can begin with it
_FILE_MODE = 0o600  # what is recorded is private

_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]")


@dataclass(slots=True)
class Meta:
    """The meta of a recording. Times are Unix seconds.

    The meta never contains secret keys or client addresses. Its `identity` has the ids of the
    client: `client_id`, which the client chooses, and `tenant` and `subject` of its credential.

    `ended_at` is absent while the session runs. A recording is incomplete if events were lost
    because of a full queue or disk, or if the process was killed before the session ended.
    """

    session_id: str
    path: str  # path of the client's URL
    mode: str
    created_at: float
    identity: dict[str, str] = field(default_factory=dict[str, str])
    dialect: str | None = None
    worker: str | None = None  # its id
    ended_at: float | None = None
    duration_s: float | None = None
    close_reason: str | None = None
    is_incomplete: bool = False
    lost_event_count: int = 0
    error: str | None = None


def is_name(name: str) -> bool:
    """Return whether `name` can be the name of a recording."""
    return _NAME.fullmatch(name) is not None


def safe_name(name: str) -> str:
    """Turn any text into a valid name of a recording."""
    return _UNSAFE.sub("_", name)[:128] or "_"


def write_meta(directory: Path, meta: Meta) -> None:
    """Replace the meta of a recording. Raises OSError."""
    write_atomically(directory / META, orjson.dumps(asdict(meta), option=orjson.OPT_INDENT_2))


def create_file(path: Path) -> BinaryIO:
    """Create a file of a recording, which only this user can read. Raises OSError."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, _FILE_MODE), "wb")


def read_meta(directory: Path) -> Meta | None:
    """Return the meta of a recording; None if it is missing or invalid."""
    try:
        known: dict[str, Any] = orjson.loads((directory / META).read_bytes())
        names = {each.name for each in fields(Meta)}
        return Meta(**{name: value for name, value in known.items() if name in names})
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def read_events(directory: Path) -> Iterator[dict[str, Any]]:
    """Yield the timeline, oldest first. Raises OSError."""
    with (directory / STREAM).open("rb") as stream:
        for _, event in read_lines(stream):
            yield event


def read_lines(stream: BinaryIO) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield each event as JSON text and as an object. Stops before the first line that is not JSON.

    If the process was killed, the last line may be incomplete.
    """
    for line in stream:
        try:
            event = orjson.loads(line)
        except orjson.JSONDecodeError:
            return
        yield line.rstrip(b"\n"), event


def prepare(root: Path) -> None:
    """Create the directory of all recordings. Raises ValueError if it is not writable."""
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            pass
    except OSError as error:
        raise ValueError(f"record: {root}: {error.strerror or error}") from None


def recordings(root: Path) -> list[Path]:
    """Return the directories of all recordings, in no order; none if `root` does not exist."""
    try:
        entries = list(root.iterdir())
    except OSError:
        return []
    return [entry for entry in entries if is_name(entry.name) and is_recording(entry)]


def is_recording(directory: Path) -> bool:
    """Return whether this is the directory of a recording. A symbolic link does not count."""
    return not directory.is_symlink() and (directory / STREAM).is_file()


def delete_recording(directory: Path) -> None:
    """Delete a recording. Raises OSError; FileNotFoundError if it has been deleted already.

    The directory is renamed first, so that a reader never sees an incomplete recording. A process
    that still writes the recording notices that it is deleted, and writes no more.
    """
    renamed = directory.with_name(f"{_DELETED}{directory.name}")
    directory.rename(renamed)
    while renamed.exists():
        # A recorder that begins deletes left-overs: it may delete a file of this directory first.
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(renamed)


def delete_leftovers(root: Path) -> None:
    """Delete the recordings whose deletion was interrupted."""
    for left_over in root.glob(f"{_DELETED}*"):
        shutil.rmtree(left_over, ignore_errors=True)


def lock(file: int) -> None:
    """Lock an open file while it is written. A recording runs while its `STREAM` file is locked.

    The kernel releases the lock when the process ends, even if it is killed.
    """
    fcntl.flock(file, fcntl.LOCK_EX)


def is_running(directory: Path) -> bool:
    """Return whether a process on this host is writing this recording."""
    return is_locked(directory / STREAM)


def is_locked(path: Path) -> bool:
    """Return whether a process on this host is writing a file; False if the file is missing."""
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
    """Return the size of all files of a recording; files deleted meanwhile count as 0."""
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.lstat().st_size
        except OSError:
            continue
    return total
