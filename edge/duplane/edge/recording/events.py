"""Replaces media in events by references to files, and these references by the media again.

Pure.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import orjson
import pybase64

_MIN_ENCODED = 64  # characters; shorter base64 (a dozen samples) stays in the event
_REFERENCE = re.compile(r"@(blob/\d{1,9}\.[a-z0-9]{1,4})")
_MAX_DEPTH = 64
# File types: the bytes that identify each type, and the offset of these bytes.
_SIGNATURES = (
    (8, b"WAVE", "wav"),
    (8, b"WEBP", "webp"),
    (4, b"ftyp", "mp4"),
    (0, b"\x1aE\xdf\xa3", "webm"),
    (0, b"\xff\xd8\xff", "jpg"),
    (0, b"\x89PNG\r\n\x1a\n", "png"),
)
_DATA_KEYS = ("data", "base64")  # fields with raw audio, unless the first bytes show another type


class _TooDeepError(ValueError):
    """The event is nested more deeply than any valid event."""


@dataclass(frozen=True, slots=True)
class Blob:
    """One payload: its file name within the recording, and the field that held it."""

    name: str
    key: str
    content: bytes

    @property
    def is_picture(self) -> bool:
        """True for video frames."""
        return self.name.endswith((".jpg", ".png", ".webp"))

    @property
    def is_audio(self) -> bool:
        """True for raw float32 audio of the conversation; False for a reference voice."""
        return self.name.endswith(".f32") and "ref" not in self.key


def split(frame: bytes, first_number: int) -> tuple[object, list[Blob]]:
    """Return the event with a reference `@blob/...` for each payload, and the payloads in order.

    Every long base64 string counts as a payload, in any field of any dialect. A frame that is not
    JSON, or is nested too deeply, is one payload. Files are numbered from `first_number`.
    """
    blobs: list[Blob] = []

    def add_blob(content: bytes, key: str) -> str:
        name = f"blob/{first_number + len(blobs):06d}.{_suffix(content, key)}"
        blobs.append(Blob(name, key, content))
        return f"@{name}"

    try:
        event = _map_texts(orjson.loads(frame), lambda text, key: _split_text(text, key, add_blob))
    except (orjson.JSONDecodeError, _TooDeepError):
        blobs.clear()
        return add_blob(frame, ""), blobs
    return event, blobs


def _split_text(text: str, key: str, add_blob: Callable[[bytes, str], str]) -> str:
    if len(text) < _MIN_ENCODED or len(text) % 4:
        return text
    try:
        content = pybase64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return text
    return add_blob(content, key)


def join(event: object, read: Callable[[str], bytes]) -> object:
    """Undo `split`: replace each reference by the base64 of what `read` returns for its name.

    A string that looks like a reference stays unchanged if `read` raises LookupError or
    FileNotFoundError.
    """

    def join_text(text: str, key: str) -> str:
        del key
        reference = _REFERENCE.fullmatch(text)
        if reference is None:
            return text
        try:
            return pybase64.b64encode_as_string(read(reference[1]))
        except (LookupError, FileNotFoundError):
            return text

    return _map_texts(event, join_text)


def _map_texts(
    value: object, change: Callable[[str, str], str], key: str = "", depth: int = 0
) -> object:
    if depth > _MAX_DEPTH:
        raise _TooDeepError
    if isinstance(value, str):
        return change(value, key)
    if isinstance(value, dict):
        fields = cast("dict[str, object]", value)
        return {name: _map_texts(item, change, name, depth + 1) for name, item in fields.items()}
    if isinstance(value, list):
        items = cast("list[object]", value)
        return [_map_texts(item, change, key, depth + 1) for item in items]
    return value


def _suffix(content: bytes, key: str) -> str:
    for offset, signature, suffix in _SIGNATURES:
        if content.startswith(signature, offset):
            return suffix
    is_audio = ("audio" in key or key in _DATA_KEYS) and len(content) % 4 == 0
    return "f32" if is_audio else "bin"
