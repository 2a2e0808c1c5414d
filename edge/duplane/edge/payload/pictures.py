"""Decodes base64 to picture files, and reads the size of a picture from its header.

Pixels are not decoded here: the header alone shows whether a picture is too large.
"""

from __future__ import annotations

from typing import cast

from duplane.edge.payload.fields import Fields, invalid, missing
from duplane.edge.payload.media import decode_file
from duplane.edge.settings import Limits
from duplane.fabric.bounds import CHAT_CONFIG

_MAX_SLICE_COUNT = int(CHAT_CONFIG["max_slice_count"][1])
_OBJECT_ALIASES = ("data", "base64")

_PNG = b"\x89PNG\r\n\x1a\n"
_JPEG = b"\xff\xd8"
_MAX_URI_HEAD = 256  # characters before the comma of a data URI
_OS2_HEADER_BYTES = 12  # length of the oldest BMP header, whose sizes have 16 bits
# Start-of-frame markers, which hold the size (ITU T.81, table B.1).
_FRAME_STARTS = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})
_STANDALONE = frozenset({0x01, *range(0xD0, 0xD8)})  # markers that no segment follows
# Segments and bytes of padding before the size. Usual files have some dozens of segments; a file of
# empty ones would stop the event loop, and so all sessions, for half a second.
_MAX_SEGMENT_COUNT = 1024


def read_frames(fields: Fields, aliases: tuple[str, ...], limits: Limits) -> tuple[bytes, ...]:
    """Return the pictures of one append; none if the field is absent. Raises ClientError.

    Each picture is base64 text, or an object with a field that holds this text.
    """
    key = fields.first(*aliases)
    items = fields.items(key, limits.frame_count) if key else None
    return tuple(
        _read_frame(item, f"{fields.path(key or '')}[{index}]", limits)
        for index, item in enumerate(items or ())
    )


def read_slice_count(fields: Fields) -> int | None:
    """Return `max_slice_nums`. A list has one number per picture; the largest is returned."""
    key = "max_slice_nums"
    if not isinstance(fields.get(key, object), list):
        return fields.integer(key, 1, _MAX_SLICE_COUNT)
    counts: list[int] = []
    for index, item in enumerate(fields.items(key, 64) or ()):
        one = Fields({str(index): item}, fields.path(key)).integer(str(index), 1, _MAX_SLICE_COUNT)
        counts.append(one or 1)
    return max(counts, default=None)


def _read_frame(item: object, path: str, limits: Limits) -> bytes:
    if isinstance(item, dict):
        nested = Fields(cast("dict[str, object]", item), path)
        key = nested.first(*_OBJECT_ALIASES)
        if key is None:
            raise missing(nested.path("data"))
        return decode_picture(nested.get(key, object), nested.path(key), limits)
    return decode_picture(item, path, limits)


def decode_picture(encoded: object, path: str, limits: Limits) -> bytes:
    """Decode the base64 of one picture file. Raises ClientError."""
    if not isinstance(encoded, str):
        raise invalid(path, "must be base64 text")
    picture = decode_file(encoded, path, limits.picture_bytes)
    size = picture_size(picture)
    if size is None:
        raise invalid(path, "is not a JPEG, PNG, WEBP, GIF or BMP picture")
    if size[0] * size[1] > limits.picture_pixels:
        raise invalid(path, f"must be at most {limits.picture_pixels} pixels")
    return picture


def decode_data_uri(uri: str, path: str, limits: Limits) -> bytes:
    """Decode the picture file in a data URI with base64. The edge fetches nothing from other URLs.

    Raises ClientError.
    """
    comma = uri.find(",", 0, _MAX_URI_HEAD)
    head = uri[:comma].lower() if comma >= 0 else ""
    if not head.startswith("data:"):
        raise invalid(path, "must be a data URI: no pictures are fetched")
    if not head.endswith(";base64"):
        raise invalid(path, "must be a data URI with base64")
    encoded = uri[comma + 1 :]
    if not encoded:
        raise missing(path)
    return decode_picture(encoded, path, limits)


def picture_size(picture: bytes) -> tuple[int, int] | None:
    """Return width and height from the header of a JPEG, PNG, WEBP, GIF or BMP file, else None."""
    size = (0, 0)
    if picture.startswith(_PNG) and picture[12:16] == b"IHDR" and len(picture) >= 24:
        size = int.from_bytes(picture[16:20]), int.from_bytes(picture[20:24])
    elif picture.startswith(_JPEG):
        size = _jpeg_size(picture)
    elif picture.startswith(b"RIFF") and picture[8:12] == b"WEBP" and len(picture) >= 30:
        size = _webp_size(picture)
    elif picture[:6] in (b"GIF87a", b"GIF89a") and len(picture) >= 10:
        size = _little(picture[6:8]), _little(picture[8:10])
    elif picture.startswith(b"BM") and len(picture) >= 26:
        size = _bmp_size(picture)
    return size if min(size) > 0 else None


def _little(field: bytes) -> int:
    return int.from_bytes(field, "little")


def _webp_size(picture: bytes) -> tuple[int, int]:
    """Return the size from the first chunk (RFC 9649, 2.5 to 2.7); zeros if it has no size."""
    match picture[12:16]:
        case b"VP8 " if picture[23:26] == b"\x9d\x01\x2a":
            return _little(picture[26:28]) & 0x3FFF, _little(picture[28:30]) & 0x3FFF
        case b"VP8L" if picture[20] == 0x2F:
            bits = _little(picture[21:25])
            return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
        case b"VP8X":
            return 1 + _little(picture[24:27]), 1 + _little(picture[27:30])
        case _:
            return 0, 0


def _bmp_size(picture: bytes) -> tuple[int, int]:
    """Return the size from the header; a negative height means rows from the top."""
    if _little(picture[14:18]) == _OS2_HEADER_BYTES:
        return _little(picture[18:20]), _little(picture[20:22])
    width = int.from_bytes(picture[18:22], "little", signed=True)
    return width, abs(int.from_bytes(picture[22:26], "little", signed=True))


def _jpeg_size(picture: bytes) -> tuple[int, int]:
    """Return the size from the first segment with a size; zeros if there is none."""
    at = 2
    for _ in range(_MAX_SEGMENT_COUNT):
        if at + 9 > len(picture) or picture[at] != 0xFF:
            break
        marker = picture[at + 1]
        if marker in _FRAME_STARTS:
            height = int.from_bytes(picture[at + 5 : at + 7])
            return int.from_bytes(picture[at + 7 : at + 9]), height
        if marker == 0xFF:  # padding
            at += 1
        elif marker in _STANDALONE:
            at += 2
        else:
            at += 2 + max(2, int.from_bytes(picture[at + 2 : at + 4]))
    return 0, 0
