"""Pictures as clients send them: base64 to the file's bytes, its size read from its header.

Nothing is decoded here; a picture that would be too large once decoded is refused unseen.
"""

from __future__ import annotations

from typing import cast

from duplane.edge.dialects.fields import Fields, invalid, missing
from duplane.edge.dialects.media import decode_file
from duplane.edge.settings import Limits

MAX_SLICE_COUNT = 9
_OBJECT_ALIASES = ("data", "base64")

_PNG = b"\x89PNG\r\n\x1a\n"
_JPEG = b"\xff\xd8"
# Start-of-frame markers, which hold the size (ITU T.81, table B.1).
_SIZES = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})
_BARE = frozenset({0x01, *range(0xD0, 0xD8)})  # markers without a segment


def read_frames(fields: Fields, aliases: tuple[str, ...], limits: Limits) -> tuple[bytes, ...]:
    """Return the pictures of one append: JPEG or PNG, none when absent. Raises ClientError.

    Each is base64 text, or an object that holds it.
    """
    key = fields.first(*aliases)
    items = fields.items(key, limits.frame_count) if key else None
    return tuple(
        _read_frame(item, f"{fields.path(key or '')}[{index}]", limits)
        for index, item in enumerate(items or ())
    )


def is_of_pictures_alone(frames: tuple[bytes, ...], fields: Fields, *audio_keys: str) -> bool:
    """Tell whether an append has pictures and no audio."""
    return bool(frames) and fields.first(*audio_keys) is None


def read_slice_count(fields: Fields) -> int | None:
    """Return `max_slice_nums`; of a list, one for each frame, the largest holds for all."""
    key = "max_slice_nums"
    if not isinstance(fields.get(key), list):
        return fields.integer(key, 1, MAX_SLICE_COUNT)
    counts: list[int] = []
    for index, item in enumerate(fields.items(key, 64) or ()):
        one = Fields({str(index): item}, fields.path(key)).integer(str(index), 1, MAX_SLICE_COUNT)
        counts.append(one or 1)
    return max(counts, default=None)


def _read_frame(item: object, path: str, limits: Limits) -> bytes:
    if isinstance(item, dict):
        nested = Fields(cast("dict[str, object]", item), path)
        key = nested.first(*_OBJECT_ALIASES)
        if key is None:
            raise missing(nested.path("data"))
        return decode_picture(nested.get(key), nested.path(key), limits)
    return decode_picture(item, path, limits)


def decode_picture(encoded: object, path: str, limits: Limits) -> bytes:
    """Return the bytes of one JPEG or PNG file. Raises ClientError."""
    if not isinstance(encoded, str):
        raise invalid(path, "must be base64 text")
    picture = decode_file(encoded, path, limits.picture_bytes)
    size = picture_size(picture)
    if size is None:
        raise invalid(path, "is not a JPEG or PNG picture")
    if size[0] * size[1] > limits.picture_pixels:
        raise invalid(path, f"must be at most {limits.picture_pixels} pixels")
    return picture


def picture_size(picture: bytes) -> tuple[int, int] | None:
    """Return width and height as a JPEG or PNG header tells them, None when it tells none."""
    if picture.startswith(_PNG) and picture[12:16] == b"IHDR" and len(picture) >= 24:
        width, height = int.from_bytes(picture[16:20]), int.from_bytes(picture[20:24])
    elif picture.startswith(_JPEG):
        width, height = _jpeg_size(picture)
    else:
        return None
    return (width, height) if width and height else None


def _jpeg_size(picture: bytes) -> tuple[int, int]:
    """Walk the segments to the one that tells the size; zeros when there is none."""
    at = 2
    while at + 9 <= len(picture) and picture[at] == 0xFF:
        marker = picture[at + 1]
        if marker in _SIZES:
            height = int.from_bytes(picture[at + 5 : at + 7])
            return int.from_bytes(picture[at + 7 : at + 9]), height
        if marker == 0xFF:  # filling
            at += 1
        elif marker in _BARE:
            at += 2
        else:
            at += 2 + max(2, int.from_bytes(picture[at + 2 : at + 4]))
    return 0, 0
