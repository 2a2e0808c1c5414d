"""Parses JSON, and measures the number and the nesting depth of its values.

A long base64 string is decoded directly; the JSON parser does not read it. For a second of audio,
the parser takes four times as long as the base64 decoder.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import orjson
import pybase64

MIN_LENGTH = 4096  # the parser reads shorter strings
_MAX_STRINGS = 32  # only the first strings of a message are examined
# The mark that the parser reads in place of the long string. A message with escapes is parsed
# whole, so no other string can equal the mark.
_MARK = "\0"
_MARK_JSON = rb'"\u0000"'
_NESTED = frozenset({dict, list})
_BEFORE_VALUE = (b"[", b"{", b",")  # each value follows one of these, except the first of an object
_FEW = 64


def load(message: bytes) -> object:
    """Parse JSON, and return its value. Raises orjson.JSONDecodeError.

    The first long string is replaced by the bytes that it encodes. But this string must be base64,
    must be a value and not a key, and must come before any list. Encoding these bytes gives the
    same string again.
    """
    if (found := _long_string(message)) is None:
        return orjson.loads(message)
    opening, closing = found
    head, rest = message[:opening], message[closing + 1 :]
    is_value = rest.lstrip()[:1] in (b",", b"}")  # a key has `:`
    if not is_value or b"[" in head or b"\\" in message:
        return orjson.loads(message)
    try:
        content = pybase64.b64decode(memoryview(message)[opening + 1 : closing], validate=True)
    except ValueError:
        return orjson.loads(message)
    last = pybase64.b64encode(content[len(content) // 3 * 3 :])
    if not message.endswith(last, opening + 1, closing):
        return orjson.loads(message)  # this is not how `b64encode` writes these bytes
    value: object = orjson.loads(b"".join((head, _MARK_JSON, rest)))
    objects = [value]
    for outer in objects:  # `objects` grows in this loop
        fields = cast("dict[str, object]", outer) if isinstance(outer, dict) else {}
        for key, inside in fields.items():
            if inside == _MARK:
                fields[key] = content
            elif isinstance(inside, dict):
                objects.append(cast("object", inside))
    return value


def _long_string(message: bytes) -> tuple[int, int] | None:
    """Find the first long string in _MAX_STRINGS strings; return the positions of its quotes."""
    closing = -1
    for _ in range(_MAX_STRINGS):
        opening = message.find(b'"', closing + 1)
        closing = message.find(b'"', opening + 1)
        if opening < 0 or closing < 0:
            return None
        if closing - opening > MIN_LENGTH:
            return opening, closing
    return None


def value_count(message: bytes) -> int:
    """Return the largest number of values that JSON can have, without parsing it."""
    return sum(_count(message, character) for character in _BEFORE_VALUE)


def _count(message: bytes, character: bytes) -> int:
    """Count a character. `find` makes this fast for a character that is rare in a long message."""
    at = -1
    for count in range(_FEW):
        at = message.find(character, at + 1)
        if at < 0:
            return count
    return message.count(character)


def is_deeper(whole: dict[str, object], depth: int) -> bool:
    """Return whether lists and objects in `whole` are nested deeper than `depth`."""
    if _NESTED.isdisjoint(map(type, whole.values())):
        return False
    level: list[object] = [whole]
    for _ in range(depth):
        level = [inside for outer in level for inside in _inside(outer)]
        if not level:
            return False
    return any(isinstance(value, dict | list) for value in level)


def _inside(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return cast("dict[str, object]", value).values()
    return cast("list[object]", value) if isinstance(value, list) else ()
