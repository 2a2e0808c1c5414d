"""Reading a client's JSON: one parse, then fields by name, each fault naming the field's path."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import orjson

from duplane.edge.faults import ClientError, ErrorCode, UnreadableError
from duplane.edge.settings import Limits

_DEFAULTS = Limits()
_FEW = 64
_TOO_DEEP = "depth limit exceeded"  # what the parser says of more than 1024

# What is told back of an object made of nothing else.
_MAX_IGNORED = 32
_MAX_IGNORED_CHARACTERS = 80


def parse(message: bytes, limits: Limits = _DEFAULTS) -> Fields:
    """Parse one text frame.

    Raises UnreadableError, or ClientError when it is not an object or has more in it than may be.
    """
    opening_count = _count(message, b"[") + _count(message, b"{")
    # Refused before it is parsed: a value of two bytes becomes an object of a hundred.
    if opening_count + _count(message, b",") > limits.json_value_count:
        raise invalid("message", f"must be at most {limits.json_value_count} values")
    try:
        event: object = orjson.loads(message)
    except orjson.JSONDecodeError as error:
        if error.msg == _TOO_DEEP:
            raise _deep(limits) from None
        raise UnreadableError("the frame is not JSON text") from None
    if opening_count > limits.json_depth and _is_deeper(event, limits.json_depth):
        raise _deep(limits)
    if not isinstance(event, dict):
        raise invalid("message", "must be a JSON object")
    return Fields(cast("dict[str, object]", event))


def _deep(limits: Limits) -> ClientError:
    return invalid("message", f"must be at most {limits.json_depth} lists and objects deep")


def _count(message: bytes, character: bytes) -> int:
    """Return how often a character is in a message. Fast where there are few in a long text."""
    at = -1
    for count in range(_FEW):
        at = message.find(character, at + 1)
        if at < 0:
            return count
    return message.count(character)


def _is_deeper(value: object, depth: int) -> bool:
    """Tell whether more than `depth` lists and objects are within one another."""
    level = [value]
    for _ in range(depth):
        level = [inside for outer in level for inside in _inside(outer)]
    return any(isinstance(value, dict | list) for value in level)


def _inside(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return cast("dict[str, object]", value).values()
    return cast("list[object]", value) if isinstance(value, list) else ()


def invalid(path: str, fault: str) -> ClientError:
    """Return the fault of a field whose value cannot be used."""
    return ClientError(ErrorCode.INVALID_PAYLOAD, f"{path}: {fault}")


def missing(path: str) -> ClientError:
    """Return the fault of a required field that is absent."""
    return ClientError(ErrorCode.MISSING_FIELD, f"{path}: required")


class Fields:
    """One JSON object; `null` counts as absent. Remembers which keys were asked for."""

    __slots__ = ("_asked", "_object", "_path")

    def __init__(self, json_object: dict[str, object], path: str = "") -> None:
        self._object = json_object
        self._path = path
        self._asked: set[str] = set()

    @property
    def whole(self) -> dict[str, object]:
        """The object itself."""
        return self._object

    def path(self, key: str) -> str:
        """Return the full name of a field, as faults tell it."""
        return f"{self._path}.{key}" if self._path else key

    def get(self, key: str) -> object:
        """Return a value of any type, None when absent."""
        self._asked.add(key)
        return self._object.get(key)

    def unused(self) -> list[str]:
        """Return the paths of fields that are set and that nobody asked for."""
        unasked = (key for key, value in self._object.items() if value is not None)
        return [self.path(key) for key in unasked if key not in self._asked]

    def first(self, *keys: str) -> str | None:
        """Return the first of several aliases that is set; all of them count as asked for."""
        self._asked.update(keys)
        return next((key for key in keys if self._object.get(key) is not None), None)

    def fields(self, key: str) -> Fields | None:
        """Return a nested object."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise invalid(self.path(key), "must be an object")
        return Fields(cast("dict[str, object]", value), self.path(key))

    def required_fields(self, key: str) -> Fields:
        """Return a nested object that must be there."""
        nested = self.fields(key)
        if nested is None:
            raise missing(self.path(key))
        return nested

    def items(self, key: str, max_count: int) -> list[object] | None:
        """Return a list of at most `max_count` values."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list):
            raise invalid(self.path(key), "must be a list")
        items = cast("list[object]", value)
        if len(items) > max_count:
            raise invalid(self.path(key), f"must be at most {max_count}")
        return items

    def text(self, key: str, *, max_bytes: int | None = None) -> str | None:
        """Return a string of at most `max_bytes` in UTF-8."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, str):
            raise invalid(self.path(key), "must be a string")
        # Every character is at least one byte: most long texts need no encoding to be refused.
        if max_bytes is not None and (
            len(value) > max_bytes or len(value.encode("utf-8")) > max_bytes
        ):
            raise invalid(self.path(key), f"must be at most {max_bytes} bytes")
        return value

    def required_text(self, key: str, *, max_bytes: int | None = None) -> str:
        """Return a string that must be there."""
        value = self.text(key, max_bytes=max_bytes)
        if value is None:
            raise missing(self.path(key))
        return value

    def flag(self, key: str) -> bool | None:
        """Return a boolean."""
        value = self.get(key)
        if value is None or isinstance(value, bool):
            return value
        raise invalid(self.path(key), "must be true or false")

    def integer(self, key: str, low: int, high: int) -> int | None:
        """Return a whole number within low..high; 3.0 is one."""
        value = self.get(key)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise invalid(self.path(key), f"must be a whole number from {low} to {high}")
        return value

    def number(self, key: str, low: float, high: float) -> float | None:
        """Return a number within low..high."""
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise invalid(self.path(key), "must be a number")
        if not low <= value <= high:
            raise invalid(self.path(key), f"must be from {low:g} to {high:g}")
        return float(value)


def ignored(*objects: Fields | None) -> tuple[str, ...]:
    """Return the paths of what was sent and read by nobody, so that none is dropped silently."""
    paths = [path for fields in objects if fields is not None for path in fields.unused()]
    return tuple(path[:_MAX_IGNORED_CHARACTERS] for path in paths[:_MAX_IGNORED])
