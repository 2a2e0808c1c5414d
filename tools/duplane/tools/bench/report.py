"""Computes percentiles and prints tables aligned by column."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def percentile(values: Sequence[float], share: float) -> float:
    """Return the percentile `share` (0..1) of `values`; nan if there are no values."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]


def show(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table."""
    sys.stdout.write(table(title, header, rows))
    sys.stdout.flush()


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table: the first column is aligned left, the others right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]

    def line(row: Sequence[str]) -> str:
        first, *others = (cell for cell in row)
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        return "  ".join(cells).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join((title, "", line(header), rule, *map(line, rows), "", ""))
