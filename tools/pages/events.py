"""Reads the events of the client protocols and their fields from `tests/specifications`.

These files are the only list of the fields: the page of the protocols, the tests and fuzzing read
it here.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

Side = Literal["client", "server"]

FOLDER = Path(__file__).parents[2] / "tests" / "specifications"
DIALECTS = ("A", "B", "B chat", "C", "D", "E", "H", "L")
_SOUND = "base64 of float32 samples, little endian, mono"
_TEXTS = {"sound_in": f"{_SOUND}, 16 kHz; or of a WAV file", "sound_out": f"{_SOUND}, 24 kHz"}


@dataclass(frozen=True)
class Field:
    """One field of an event; `fields.toml` describes the types."""

    path: str  # `[]` stands for any index of a list
    is_required: bool  # every event has it, or every event that has the object around it
    type: str
    meaning: str
    values: Sequence[object] = ()  # empty if there are too many to list
    pattern: str = ""
    length: Sequence[int] = ()


@dataclass(frozen=True)
class Event:
    """One type of event: its fields by path; and if it has a field `kind`, those of each kind."""

    fields: Mapping[str, Field]
    kinds: Mapping[str, Mapping[str, Field]]

    def always_has(self, path: str) -> bool:
        """Return whether every event of the type has the field."""
        names = path.split(".")
        around = [".".join(names[:count]).removesuffix("[]") for count in range(1, len(names))]
        return all(self.fields[name].is_required for name in (*around, path))


def read(dialect: str) -> dict[str, Any]:
    """Read the specification of a dialect; both forms of B are in one file."""
    return _file(dialect[0].lower())


@cache
def events(dialect: str, side: Side) -> Mapping[str, Event]:
    """Return the events that clients, or the edge, send in a dialect."""
    specification = read(dialect)
    own: dict[str, Any] = specification.get("chat" if dialect == "B chat" else "duplex", {})
    named: dict[str, dict[str, Any]] = specification[side] | own.get(side, {})
    tables = (own.get("fields", {}), specification.get("fields", {}), _file("fields"))
    parts = specification.get("parts", {})
    return {kind: _event(kind, lists, parts, tables) for kind, lists in named.items()}


def is_part(dialect: str, path: str) -> bool:
    """Return whether the field is inside of an object that is the same in several events."""
    root, dot, _ = path.partition(".")
    return bool(dot) and root in read(dialect).get("parts", {})


def _event(
    kind: str,
    lists: Mapping[str, Any],
    parts: Mapping[str, Sequence[str] | str],
    tables: Sequence[Mapping[str, Any]],
) -> Event:
    required, optional = lists.get("required", []), lists.get("optional", [])
    by_kind: Mapping[str, Sequence[str]] = lists.get("kinds", {})

    def fields(paths: Iterable[str], required: Sequence[str]) -> dict[str, Field]:
        found: dict[str, Field] = {}
        for path in paths:
            found[path] = _field(kind, path, tables, is_required=path in required)
            inside = parts.get(path, ())
            for inner in parts[inside] if isinstance(inside, str) else inside:
                found[f"{path}.{inner}"] = _field(kind, f"{path}.{inner}", tables, is_required=True)
        return found

    shared = [*required, *optional]
    of_kinds = [path for paths in by_kind.values() for path in paths if path not in shared]
    return Event(
        fields(_grouped([*shared, *of_kinds]), required),
        {
            name: fields(dict.fromkeys([*shared, *paths]), [*required, *paths])
            for name, paths in by_kind.items()
        },
    )


def _grouped(paths: Sequence[str]) -> list[str]:
    """Put the fields of an object behind the object."""
    roots = [path.partition(".")[0] for path in paths]
    return sorted(
        dict.fromkeys(paths),
        key=lambda path: (roots.index(path.partition(".")[0]), path not in roots),
    )


def _field(
    kind: str, path: str, tables: Sequence[Mapping[str, Any]], *, is_required: bool
) -> Field:
    described = dict(next(_descriptions(kind, path.removesuffix("[]"), tables)))
    meaning = described.pop("meaning", "")
    if not meaning and "values" in described:
        *values, last = (f"`{value}`" for value in described["values"])
        meaning = f"{', '.join(values)} or {last}" if values else f"always {last}"
    if path.endswith("[]"):
        described["type"] = "string" if described["type"] == "list of strings" else "any"
        described.pop("length", None)
    if described["type"].startswith("sound") and not meaning:
        meaning = "{sound_out}"
    return Field(path, is_required, meaning=meaning.format(**_TEXTS), **described)


def _descriptions(
    kind: str, path: str, tables: Sequence[Mapping[str, Any]]
) -> Iterator[Mapping[str, Any]]:
    """Yield the descriptions of a field, the most special one first; then raise KeyError."""
    names = path.split(".")
    keys = [f"{kind} {path}", *(".".join(names[start:]) for start in range(len(names)))]
    yield from (table[key] for table in tables for key in keys if key in table)
    raise KeyError(f"{kind} {path} is not described")


@cache
def _file(name: str) -> dict[str, Any]:
    return tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
