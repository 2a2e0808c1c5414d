"""Answers requests for `/api/sessions` and the paths below it, from the recordings on disk.

Names and paths come from clients, so only valid names of recordings and files are looked up. All
functions read the disk: call them in a thread. The caller checks that the client is an operator.
"""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from duplane.edge.recording.storage import (
    STREAM,
    Meta,
    is_name,
    is_recording,
    read_lines,
    read_meta,
    recordings,
)

Json = dict[str, object]

# The file names that a recording can have. No such name leads out of its directory.
_FILE = re.compile(
    r"(?:blob/)?[A-Za-z0-9_-]+\.(?P<suffix>json|jsonl|txt|wav|f32|pcm|ulaw|alaw|jpg|png|webp|mp4|webm|bin)"
)
_CONTENT_TYPES = {
    "json": "application/json",
    "jsonl": "application/x-ndjson",
    "wav": "audio/wav",
    "txt": "text/plain; charset=utf-8",
    "mp4": "video/mp4",
    "webm": "video/webm",
    "jpg": "image/jpeg",
    "png": "image/png",
    "webp": "image/webp",
}
_OTHER_CONTENT = "application/octet-stream"
_BLOCK_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class Asset:
    """One file of a recording, and its content type."""

    path: Path
    content_type: str


def session_list(root: Path, limit: int = 1000) -> Json:
    """Return the newest `limit` recordings, newest first.

    `total` is the number of all recordings.
    """
    known = [meta for directory in recordings(root) if (meta := read_meta(directory))]
    known.sort(key=lambda meta: meta.created_at, reverse=True)
    return {"total": len(known), "sessions": [_row(meta) for meta in known[:limit]]}


def session_meta(root: Path, name: str) -> Json | None:
    """Return the meta of a recording; None if there is no such recording."""
    directory = find_recording(root, name)
    meta = read_meta(directory) if directory else None
    return asdict(meta) if meta else None


def session_recording(root: Path, name: str) -> Iterator[bytes] | None:
    """Return the blocks of a recording's timeline as JSON; None if there is no such recording.

    A timeline can be too long for memory, so it is read block by block.
    """
    directory = find_recording(root, name)
    meta = read_meta(directory) if directory else None
    return _render_recording(directory, meta) if directory and meta else None


def session_asset(root: Path, name: str, path: str) -> Asset | None:
    """Return one file of a recording; None if there is no such file.

    `path` may begin with @, like a reference in an event.
    """
    directory = find_recording(root, name)
    match = _FILE.fullmatch(path.removeprefix("@"))
    if directory is None or match is None:
        return None
    file = directory / match[0]
    # The edge creates no symbolic links, so it follows none.
    if file.is_symlink() or file.parent.is_symlink() or not file.is_file():
        return None
    return Asset(file, _CONTENT_TYPES.get(match["suffix"], _OTHER_CONTENT))


def read_range(path: Path, span: range) -> Iterator[bytes]:
    """Yield a range of the bytes of a file."""
    with path.open("rb") as file:
        file.seek(span.start)
        left = len(span)
        while left and (block := file.read(min(left, _BLOCK_BYTES))):
            left -= len(block)
            yield block


def session_archive(root: Path, name: str) -> Iterator[bytes] | None:
    """Return the blocks of a ZIP file of a recording; None if there is no such recording."""
    directory = find_recording(root, name)
    return _zip(root, directory) if directory else None


def find_recording(root: Path, name: str) -> Path | None:
    """Return the directory of a recording; None if there is no such recording."""
    directory = root / name
    return directory if is_name(name) and is_recording(directory) else None


def _render_recording(directory: Path, meta: Meta) -> Iterator[bytes]:
    head = orjson.dumps({"session_id": meta.session_id, "meta": asdict(meta)})
    block = bytearray(head[:-1] + b',"events":[')
    separator = b""
    with (directory / STREAM).open("rb") as stream:
        for line, _ in read_lines(stream):
            block += separator + line
            separator = b","
            if len(block) >= _BLOCK_BYTES:
                yield bytes(block)
                block.clear()
    yield bytes(block + b"]}")


def _row(meta: Meta) -> Json:
    """Return a row of the list of recordings, with the keys that the reference's clients expect."""
    return {
        **asdict(meta),
        "ticket_id": None,
        "worker_id": meta.worker,
        "messages_hash": None,
        "last_active": meta.ended_at or meta.created_at,
    }


class _Buffer(io.RawIOBase):
    """Holds the bytes that a ZipFile has written, until they are sent."""

    def __init__(self) -> None:
        self._written = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, content: object, /) -> int:
        view = memoryview(content)  # pyright: ignore[reportArgumentType] - any buffer, says io
        self._written += view
        return view.nbytes

    def clear(self) -> bytes:
        """Return the bytes written since the last call."""
        written = bytes(self._written)
        self._written.clear()
        return written


def _zip(root: Path, directory: Path) -> Iterator[bytes]:
    """Yield the archive. The session may still run, so files may grow or be deleted meanwhile."""
    buffer = _Buffer()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for path in sorted(directory.rglob("*")):
            name = path.relative_to(directory).as_posix()
            if session_asset(root, directory.name, name) is None:
                continue
            try:
                source = path.open("rb")
            except OSError:
                continue
            member = zipfile.ZipInfo(f"{directory.name}/{name}")
            member.compress_type = zipfile.ZIP_DEFLATED
            with source, archive.open(member, "w", force_zip64=True) as entry:
                while block := source.read(_BLOCK_BYTES):
                    entry.write(block)
                    if compressed := buffer.clear():
                        yield compressed
    yield buffer.clear()
