"""Reads the TOML file with the settings of all processes (`--config`)."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

TABLES = ("up", "edge", "scheduler", "worker")


def read_config(file: Path) -> dict[str, dict[str, Any]]:
    """Return the tables of a config file, one for each process.

    Raises ValueError that names the file and the fault.
    """
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from None
    for name, table in tables.items():
        if name not in TABLES:
            raise ValueError(f"{file}: {name!r} is not one of {', '.join(TABLES)}")
        if not isinstance(table, dict):
            raise ValueError(f"{file}: {name!r} must be a table")
    return tables
