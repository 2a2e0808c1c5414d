"""What `duplane bench fabric` shows: progress, tables, and the content of the JSON file. Pure."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from duplane.tools.bench.load.reports import Seen
from duplane.tools.bench.load.row import Percentiles, Row
from duplane.tools.bench.options import FabricBench
from duplane.tools.bench.report import percentile, show

VERSION = 1
"""Version of the JSON file's schema; see docs/load.md."""


def progress_text(dialect: str, sessions: int, seen: Seen) -> str:
    """Return one line about a run that goes on."""
    counts = seen.counts
    added = [one.added_ms for one in seen.timed]
    p50, p99 = percentile(added, 0.5), percentile(added, 0.99)
    bad = counts.dropped + counts.failed + counts.doubled + counts.unsent + counts.broken_sessions
    return (
        f"{dialect}, {sessions} sessions: {len(added)} units answered, added p50 {p50:.1f} ms,"
        f" p99 {p99:.1f} ms; {counts.late} late, {bad} wrong;"
        f" generator p99 {percentile(seen.lateness_ms, 0.99):.1f} ms late"
    )


def show_rows(rows: Sequence[Row]) -> None:
    """Print the tables of latencies and of costs."""
    if not rows:
        return
    show(
        "ms that the fabric adds to a unit (in A the worker's own time is part of it)",
        ("", "units", "p50", "p95", "p99", "max", "late", "wrong", "generator p99", "loop p99", ""),
        [_latency_cells(row) for row in rows],
    )
    names = list(dict.fromkeys(name for row in rows for name in row.processes))
    header = ["", *(f"{name} us/unit" for name in names)]
    header += [f"{name} {what}" for name in names for what in ("MB before", "peak")]
    show(
        "CPU time for one unit; memory before the first session and at its peak",
        [*header, "cores of generators"],
        [_cost_cells(row, names) for row in rows],
    )


def _name(row: Row) -> str:
    return (
        f"{row.dialect}, {row.sessions} in step"
        if row.phases == "step"
        else (f"{row.dialect}, {row.sessions}")
    )


def _latency_cells(row: Row) -> Sequence[str]:
    counts, generator = row.counts, row.generator
    wrong = counts.dropped + counts.failed + counts.unanswered + counts.doubled + counts.unsent
    return (
        *(_name(row), str(counts.answered), *_cells(row.added_ms)),
        *(str(counts.late), str(wrong + counts.broken_sessions)),
        *(_ms(generator.lateness_ms.p99), _ms(generator.loop_delay_ms.p99)),
        "; ".join(row.problems) or "holds",
    )


def _cells(figures: Percentiles) -> Sequence[str]:
    return [_ms(value) for value in (figures.p50, figures.p95, figures.p99, figures.max)]


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _cost_cells(row: Row, names: Sequence[str]) -> Sequence[str]:
    costs = [row.processes.get(name) for name in names]
    return (
        _name(row),
        *(
            "" if not cost or cost.cpu_us_per_unit is None else f"{cost.cpu_us_per_unit:.0f}"
            for cost in costs
        ),
        *(
            f"{size:.0f}" if cost else ""
            for cost in costs
            for size in ((cost.rss_before_mb, cost.rss_peak_mb) if cost else (0.0, 0.0))
        ),
        f"{row.generator.cpu_cores:.2f}",
    )


def capacity_text(dialect: str, sessions: int, options: FabricBench) -> str:
    """Return the result of a search."""
    rest = (
        f" (it was not tried with more than {sessions})" if sessions == options.max_sessions else ""
    )
    return (
        f"dialect {dialect}: {sessions} sessions hold{rest}: p99 of the added time at most"
        f" {options.limit_ms:g} ms, every unit answered once and in time, generator at most"
        f" {options.max_lateness_ms:g} ms late\n"
    )


def document(
    options: FabricBench, rows: Sequence[Row], capacities: Mapping[str, int]
) -> dict[str, Any]:
    """Return the content of the JSON file."""
    return {
        "version": VERSION,
        "machine": {"cores": os.cpu_count(), "load_average": os.getloadavg()[0]},
        "options": {
            name: str(value) if hasattr(value, "__fspath__") else value
            for name, value in asdict(options).items()
        },
        "rows": [asdict(row) | {"holds": row.holds} for row in rows],
        "capacities": capacities,
    }
