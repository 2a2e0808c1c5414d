"""The files that `duplane bench fabric` writes: all figures as JSON, and a chart."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from duplane.tools.bench.load.row import Row
from duplane.tools.bench.options import FabricBench
from duplane.tools.command import UsageError

_VERSION = 1  # version of the JSON schema, which docs/load.md describes


class Files:
    """The files that the options name. Raises UsageError if one cannot be written."""

    def __init__(self, options: FabricBench) -> None:
        self._options = options
        for name, file in (("json", options.json), ("png", options.png)):
            _check(name, file)
        if options.png:
            from duplane.tools.bench.load.chart import write_chart  # needs Pillow

            self._write_chart = write_chart

    def write(self, rows: Sequence[Row], capacities: Mapping[str, int]) -> None:
        """Write the files."""
        if self._options.json:
            told = document(self._options, rows, capacities)
            self._options.json.write_bytes(orjson.dumps(told, option=orjson.OPT_INDENT_2))
        if self._options.png and rows:
            self._write_chart(self._options.png, rows)


def _check(name: str, file: Path | None) -> None:
    """Check before the measurement that a file can be written."""
    try:
        if file:
            file.open("ab").close()
    except OSError as error:
        raise UsageError(f"{name}: {file} cannot be written: {error.strerror}") from None


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
