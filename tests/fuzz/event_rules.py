"""The rules for server events, from the specifications: the fields of each event, their values."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import pybase64
from support.protocols.specifications import parts

from duplane.edge.client_errors import ErrorCode
from pages.events import Field, events

_MAP = "object of strings"  # with keys that a client chooses
QUEUE_EVENTS = frozenset({"session.queued", "session.queue_update", "session.queue_done"})
"""Events that are the same in A and B."""
CLOSINGS = {
    "A": ("session.closed",),
    "B": ("session.closed",),
    "B chat": ("session.closed",),
    "C": ("stopped", "timeout"),
    "D": ("done",),
    "E": (),  # a session ends with `error`, as its other faults
    "H": ("stopped", "timeout"),
    "L": ("session.closed",),
}
"""The events that close a session. A session that is refused ends with `error` instead."""


class IllegalError(Exception):
    """The edge has broken a rule."""


def check_event(dialect: str, event: Any) -> None:
    """Raise IllegalError unless the dialect allows `event` and each of its fields."""
    if not isinstance(event, dict):
        raise IllegalError(f"{dialect}: no object: {str(event)[:200]}")
    name, kind = (str(event.get(key)) for key in ("type", "kind"))
    specified = events(dialect, "server").get(name)
    if specified is None:
        raise IllegalError(f"{dialect}: no such event: {name}")
    where = f"{dialect}: {name}"
    fields = specified.fields
    if specified.kinds:
        fields = specified.kinds.get(kind)
        if fields is None:
            raise IllegalError(f"{where}: no such kind: {kind}")
    _check_fields(fields, event, where)
    if name == "error" and isinstance(event["error"], dict) and dialect not in ("E", "L"):
        error = event["error"]
        if ErrorCode(error["code"]).fault != error["type"]:
            raise IllegalError(f"{where}: {error['code']} is no {error['type']}")


def _check_fields(fields: Mapping[str, Field], event: Mapping[str, Any], where: str) -> None:
    found = dict(parts({key: value for key, value in event.items() if key != "type"}))
    maps = [f"{path}." for path, field in fields.items() if _MAP in field.type]
    found = {path: value for path, value in found.items() if not path.startswith(tuple(maps))}
    for path, value in found.items():
        if path not in fields:
            raise IllegalError(f"{where}: unknown field {path}")
        if not fits(fields[path], value):
            raise IllegalError(f"{where}.{path}: must not be {str(value)[:100]!r}")
    for path, field in fields.items():
        around = path.rpartition(".")[0]
        if field.is_required and path not in found and (not around or around in found):
            raise IllegalError(f"{where}.{path}: absent")


def fits(field: Field, value: Any) -> bool:
    """Return whether a field may have this value."""
    if not any(_TYPES[name](value) for name in field.type.split(" or ")):
        return False
    if field.values and value not in field.values:
        return False
    if field.pattern and re.fullmatch(field.pattern, value) is None:
        return False
    if field.length:
        low, high = field.length
        return low <= len(value.encode() if isinstance(value, str) else value) <= high
    return True


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_sound(value: Any) -> bool:
    return isinstance(value, str) and len(pybase64.b64decode(value, validate=True)) % 4 == 0


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _is_map(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(item, str) for item in value.values())


_TYPES: Mapping[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "sound": _is_sound,
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": _is_number,
    "boolean": lambda value: isinstance(value, bool),
    "object": lambda value: isinstance(value, dict),
    "list of strings": _are_texts,
    "list of objects": _are_objects,
    _MAP: _is_map,
    "any": lambda _: True,
    "null": lambda value: value is None,
}
