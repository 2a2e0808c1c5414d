"""The JSON file that `duplane bench fabric` writes, with all figures."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from duplane.tools.bench.load.row import Row
from duplane.tools.bench.options import FabricBench
from duplane.tools.command import UsageError

_VERSION = 1  # version of the JSON schema, which docs/load.md describes


def check_writable(file: Path) -> None:
    """Check before the measurement that a file can be written. Raises UsageError."""
    try:
        file.open("ab").close()
    except OSError as error:
        raise UsageError(f"json: {file} cannot be written: {error.strerror}") from None


def document(
    options: FabricBench, rows: Sequence[Row], capacities: Mapping[str, int]
) -> dict[str, Any]:
    """Return the content of the JSON file."""
    return {
        "version": _VERSION,
        "machine": {"cores": os.cpu_count(), "load_average": os.getloadavg()[0]},
        "options": {
            name: str(value) if hasattr(value, "__fspath__") else value
            for name, value in asdict(options).items()
        },
        "rows": [asdict(row) | {"holds": row.holds} for row in rows],
        "capacities": capacities,
    }
