"""The file that describes a device: how many sessions it was measured to serve."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

MAX_BYTES = 64 * 1024
_FIELDS = {"name", "source", "measured"}
_ROW_FIELDS = {"speaking", "slots"}


@dataclass(frozen=True)
class DeviceRow:
    """One device serves `slots` sessions if at most the share `speaking` of them speaks."""

    speaking: float
    slots: int


@dataclass(frozen=True)
class DeviceFigures:
    """What was measured on one type of device, and how."""

    name: str
    source: str
    rows: Sequence[DeviceRow]

    def slots(self, speaking: float) -> int:
        """Return the sessions of one device, if this share of them speaks. Raises ValueError."""
        fit = [row for row in self.rows if row.speaking >= speaking]
        if not fit:
            highest = max(row.speaking for row in self.rows)
            raise ValueError(f"speaking: {self.name} was measured only up to {highest:g}")
        return min(fit, key=lambda row: row.speaking).slots


def read_device(path: Path) -> DeviceFigures:
    """Read a device's file. Raises ValueError naming the field, and OSError."""
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"is larger than {MAX_BYTES} bytes")
    return parse_device(tomllib.loads(content.decode()))


def parse_device(fields: Mapping[str, object]) -> DeviceFigures:
    """Return the figures of a device's file. Raises ValueError naming the field."""
    if unknown := fields.keys() - _FIELDS:
        raise ValueError(f"{min(unknown)}: no such field")
    name, source, measured = (fields.get(field) for field in ("name", "source", "measured"))
    if not isinstance(name, str) or not name:
        raise ValueError("name: must be a text")
    if not isinstance(source, str) or not source:
        raise ValueError("source: must say how the slots were measured")
    if not isinstance(measured, list) or not measured:
        raise ValueError("measured: must be at least one table")
    rows = cast("list[object]", measured)
    return DeviceFigures(name, source, [_row(at, row) for at, row in enumerate(rows)])


def _row(index: int, row: object) -> DeviceRow:
    path = f"measured[{index}]"
    if not isinstance(row, dict):
        raise ValueError(f"{path}: must be a table")
    fields = cast("dict[str, object]", row)
    if unknown := fields.keys() - _ROW_FIELDS:
        raise ValueError(f"{path}.{min(unknown)}: no such field")
    speaking, slots = fields.get("speaking"), fields.get("slots")
    if (
        not isinstance(speaking, int | float)
        or isinstance(speaking, bool)
        or not 0 <= speaking <= 1
    ):
        raise ValueError(f"{path}.speaking: must be from 0 to 1")
    if not isinstance(slots, int) or isinstance(slots, bool) or slots < 1:
        raise ValueError(f"{path}.slots: must be a whole number from 1")
    return DeviceRow(float(speaking), slots)
