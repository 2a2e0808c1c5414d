"""Parses a client's JSON once and reads its fields by name. Errors name the field's path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar, cast, overload

import orjson
import pybase64

from duplane.edge.client_errors import ClientError, ErrorCode, UnreadableError
from duplane.edge.payload import json_text
from duplane.edge.settings import Limits

_DEFAULTS = Limits()
V = TypeVar("V")

BASE64 = (str, bytes)
"""The types of a base64 string: `str`, or `bytes` if it was long and is already decoded."""

_TYPE_NAMES: Mapping[type | tuple[type, ...], str] = {
    BASE64: "a string",
    str: "a string",
    bool: "true or false",
    dict: "an object",
    list: "a list",
}
_TOO_DEEP = "depth limit exceeded"  # the parser's message above a depth of 1024

# Bounds of the list of unused fields in an answer.
_MAX_IGNORED = 32
_MAX_IGNORED_CHARACTERS = 80


def parse(message: bytes, limits: Limits = _DEFAULTS) -> Fields:
    """Parse one text frame.

    Raises UnreadableError if the frame is not JSON, and ClientError if the JSON is not an object or
    exceeds a bound.
    """
    # Count before parsing: the parser can make an object of 100 bytes from two bytes of JSON.
    max_count = limits.json_value_count
    if len(message) > max_count and json_text.value_count(message) > max_count:
        raise invalid("message", f"must be at most {max_count} values")
    try:
        event = json_text.load(message)
    except orjson.JSONDecodeError as error:
        if error.msg == _TOO_DEEP:
            raise _deep(limits) from None
        raise UnreadableError("the frame is not JSON text") from None
    if not isinstance(event, dict):
        raise invalid("message", "must be a JSON object")
    whole = cast("dict[str, object]", event)
    if json_text.is_deeper(whole, limits.json_depth):
        raise _deep(limits)
    return Fields(whole)


def _deep(limits: Limits) -> ClientError:
    return invalid("message", f"must be at most {limits.json_depth} lists and objects deep")


def invalid(path: str, fault: str) -> ClientError:
    """Return the error for a field with an invalid value."""
    return ClientError(ErrorCode.INVALID_PAYLOAD, f"{path}: {fault}")


def missing(path: str) -> ClientError:
    """Return the error for a required field that is absent."""
    return ClientError(ErrorCode.MISSING_FIELD, f"{path}: required")


@dataclass(slots=True, eq=False)
class Fields:
    """One JSON object; `null` counts as absent. Remembers which fields were read."""

    whole: dict[str, object]  # the object itself
    _path: str = ""
    _read: set[str] = field(default_factory=set[str], init=False)

    def path(self, key: str) -> str:
        """Return the full name of a field, for error messages."""
        return f"{self._path}.{key}" if self._path else key

    @overload
    def get(self, key: str, kind: type[V] | tuple[type[V], ...]) -> V | None: ...

    @overload
    def get(
        self, key: str, kind: type[V] | tuple[type[V], ...], *, required: Literal[True]
    ) -> V: ...

    def get(
        self, key: str, kind: type[V] | tuple[type[V], ...], *, required: bool = False
    ) -> V | None:
        """Return a value of one type (`object` stands for any); None if it is absent."""
        self._read.add(key)
        value = self.whole.get(key)
        if value is None:
            if required:
                raise missing(self.path(key))
            return None
        if isinstance(value, kind):
            return value
        if kind is str and isinstance(value, bytes):
            return cast("V", pybase64.b64encode(value).decode())
        raise invalid(self.path(key), f"must be {_TYPE_NAMES[kind]}")

    def expect(self, key: str, values: frozenset[str]) -> None:
        """Count a field as read if its value is one of `values`; then `unused` does not list it."""
        value = self.whole.get(key)
        if isinstance(value, str) and value in values:
            self._read.add(key)

    def unused(self) -> list[str]:
        """Return the paths of fields that have a value and were never read."""
        unread = (key for key, value in self.whole.items() if value is not None)
        return [self.path(key) for key in unread if key not in self._read]

    def first(self, *keys: str) -> str | None:
        """Return the first of several aliases that has a value; all aliases count as read."""
        self._read.update(keys)
        return next((key for key in keys if self.whole.get(key) is not None), None)

    def fields(self, key: str) -> Fields | None:
        """Return a nested object."""
        value = cast("dict[str, object] | None", self.get(key, dict))
        return None if value is None else Fields(value, self.path(key))

    def required_fields(self, key: str) -> Fields:
        """Return a nested object. It is required."""
        nested = self.fields(key)
        if nested is None:
            raise missing(self.path(key))
        return nested

    def items(self, key: str, max_count: int) -> list[object] | None:
        """Return a list of at most `max_count` values."""
        items = cast("list[object] | None", self.get(key, list))
        if items is not None and len(items) > max_count:
            raise invalid(self.path(key), f"must be at most {max_count}")
        return items

    def text(self, key: str, max_bytes: int) -> str | None:
        """Return a string of at most `max_bytes` in UTF-8."""
        value = self.get(key, str)
        # A character has at least one byte, so most long texts are refused without encoding them.
        if value is not None and (len(value) > max_bytes or len(value.encode()) > max_bytes):
            raise invalid(self.path(key), f"must be at most {max_bytes} bytes")
        return value

    def required_text(self, key: str, max_bytes: int) -> str:
        """Return a string of at most `max_bytes` in UTF-8. It is required."""
        value = self.text(key, max_bytes)
        if value is None:
            raise missing(self.path(key))
        return value

    def shortened_text(self, key: str, max_bytes: int) -> str:
        """Return a string, cut to `max_bytes` in UTF-8; empty if it is absent."""
        text = self.get(key, str) or ""
        return text.encode()[:max_bytes].decode(errors="ignore")

    def integer(self, key: str, low: int, high: int) -> int | None:
        """Return a whole number within low..high. A float without a fraction (3.0) is accepted."""
        value = self.get(key, object)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise invalid(self.path(key), f"must be a whole number from {low} to {high}")
        return value

    def number(self, key: str, low: float, high: float) -> float | None:
        """Return a number within low..high."""
        value = self.get(key, object)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise invalid(self.path(key), "must be a number")
        if not low <= value <= high:
            raise invalid(self.path(key), f"must be from {low:g} to {high:g}")
        return float(value)


def ignored(*objects: Fields | None) -> tuple[str, ...]:
    """Return the paths of fields that had no effect, for the answer to the client."""
    paths = [path for fields in objects if fields is not None for path in fields.unused()]
    return tuple(path[:_MAX_IGNORED_CHARACTERS] for path in paths[:_MAX_IGNORED])
