"""What `/api/sessions` and the paths below it answer, from the directory of recordings alone.

Names and paths come from outside: what is not the name of a recording or of one of its files is
not found. Everything here reads the disk: call it from a thread. Whoever routes to it decides who
may ask; recordings are people's voices.
"""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from duplane.edge.recording.shelf import (
    STREAM,
    Meta,
    is_name,
    is_recording,
    read_lines,
    read_meta,
    recordings,
)

Json = dict[str, object]

# Every file of a recording: no name has a way up in it.
_FILE = re.compile(
    r"(?:blob/)?[A-Za-z0-9_-]+\.(?P<suffix>json|jsonl|txt|wav|f32|jpg|png|webp|mp4|webm|bin)"
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
_PIECE_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class Asset:
    """One file of a recording, to be sent as it is."""

    path: Path
    content_type: str


def session_list(root: Path, limit: int = 1000) -> Json:
    """Answer GET /api/sessions: the newest first, at most `limit`; `total` counts all."""
    known = [meta for directory in recordings(root) if (meta := read_meta(directory))]
    known.sort(key=lambda meta: meta.created_at, reverse=True)
    return {"total": len(known), "sessions": [_row(meta) for meta in known[:limit]]}


def session_meta(root: Path, name: str) -> Json | None:
    """Answer GET /api/sessions/{name}, None for not found."""
    directory = find_recording(root, name)
    meta = read_meta(directory) if directory else None
    return asdict(meta) if meta else None


def session_recording(root: Path, name: str) -> Iterator[bytes] | None:
    """Answer GET /api/sessions/{name}/recording: JSON in pieces, None for not found.

    A timeline can be long: never more than a few events of it are in memory.
    """
    directory = find_recording(root, name)
    meta = read_meta(directory) if directory else None
    return _told_whole(directory, meta) if directory and meta else None


def session_asset(root: Path, name: str, path: str) -> Asset | None:
    """Answer GET /api/sessions/{name}/assets/{path}, None for not found.

    `path` may begin with the @ that references in events have.
    """
    directory = find_recording(root, name)
    match = _FILE.fullmatch(path.removeprefix("@"))
    if directory is None or match is None:
        return None
    file = directory / match[0]
    # A link would be somebody else's doing; none is followed.
    if file.is_symlink() or file.parent.is_symlink() or not file.is_file():
        return None
    return Asset(file, _CONTENT_TYPES.get(match["suffix"], _OTHER_CONTENT))


def read_pieces(path: Path, wanted: range) -> Iterator[bytes]:
    """Yield these bytes of a file."""
    with path.open("rb") as file:
        file.seek(wanted.start)
        left = len(wanted)
        while left and (piece := file.read(min(left, _PIECE_BYTES))):
            left -= len(piece)
            yield piece


def session_archive(root: Path, name: str) -> Iterator[bytes] | None:
    """Answer GET /api/sessions/{name}/download: a ZIP file in pieces, None for not found."""
    directory = find_recording(root, name)
    return _zip(root, directory) if directory else None


def find_recording(root: Path, name: str) -> Path | None:
    """Return the directory of a recording, None for not found."""
    directory = root / name
    return directory if is_name(name) and is_recording(directory) else None


def _told_whole(directory: Path, meta: Meta) -> Iterator[bytes]:
    told = orjson.dumps({"session_id": meta.session_id, "meta": asdict(meta)})
    pieces = bytearray(told[:-1] + b',"events":[')
    separator = b""
    with (directory / STREAM).open("rb") as stream:
        for line, _ in read_lines(stream):
            pieces += separator + line
            separator = b","
            if len(pieces) >= _PIECE_BYTES:
                yield bytes(pieces)
                pieces.clear()
    yield bytes(pieces + b"]}")


def _row(meta: Meta) -> Json:
    """Return one session, with the keys that clients of the reference look for."""
    return {
        **asdict(meta),
        "ticket_id": None,
        "worker_id": meta.worker,
        "messages_hash": None,
        "last_active": meta.ended_at or meta.created_at,
    }


class _Pieces(io.RawIOBase):
    """Takes what a ZIP file is made of, so that it never has to be whole in memory."""

    def __init__(self) -> None:
        self._taken = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, content: object, /) -> int:
        view = memoryview(content)  # pyright: ignore[reportArgumentType] - any buffer, says io
        self._taken += view
        return view.nbytes

    def take(self) -> bytes:
        taken = bytes(self._taken)
        self._taken.clear()
        return taken


def _zip(root: Path, directory: Path) -> Iterator[bytes]:
    """Yield the archive; a file that vanishes or grows meanwhile is taken as far as it goes."""
    pieces = _Pieces()
    with zipfile.ZipFile(pieces, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
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
                while piece := source.read(_PIECE_BYTES):
                    entry.write(piece)
                    if ready := pieces.take():
                        yield ready
    yield pieces.take()
