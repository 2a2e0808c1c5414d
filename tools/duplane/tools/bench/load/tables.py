"""The output of `duplane bench fabric`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from duplane.tools.bench.load.ledger import Counts
from duplane.tools.bench.load.reports import Report
from duplane.tools.bench.load.row import Moves, Percentiles, Row
from duplane.tools.bench.options import FabricBench
from duplane.tools.bench.report import percentile, show


def progress_text(dialect: str, sessions: int, counts: Counts, recent: Report) -> str:
    """Return one line about a run in progress. `recent` has the times since the last line."""
    added = [one.added_ms for one in recent.timed]
    p50, p99 = percentile(added, 0.5), percentile(added, 0.99)
    bad = counts.dropped + counts.failed + counts.doubled + counts.unsent + counts.broken_sessions
    return (
        f"{dialect}, {sessions} sessions: {counts.answered} units answered, {counts.late} late,"
        f" {bad} wrong; since the last line added p50 {p50:.1f} ms, p99 {p99:.1f} ms,"
        f" generator p99 {percentile(recent.lateness_ms, 0.99):.1f} ms late"
    )


def show_rows(rows: Sequence[Row]) -> None:
    """Print the tables of latencies and of costs."""
    if not rows:
        return
    show(
        "ms that the fabric adds to a unit (in A including the worker's own time)",
        ("", "units", "p50", "p95", "p99", "max", "late", "wrong", "generator p99", "loop p99", ""),
        [_latency_cells(row) for row in rows],
    )
    show(
        "CPU time; MB before the first session, in the middle and at the end of the measurement",
        ("", "us per unit", "cores", "before", "middle", "end", "peak"),
        [cells for row in rows for cells in _cost_cells(row)],
    )

    if any(row.moves for row in rows):
        show(
            "stopped workers; ms from a unit to its answer, for the first unit after the stop",
            ("", "stops", "moved", "lost", "gap p50", "p95", "p99", "max", "slots left"),
            [_move_cells(row, row.moves) for row in rows if row.moves],
        )


def _name(row: Row) -> str:
    return f"{row.dialect}, {row.sessions}{' in step' if row.phases == 'step' else ''}"


def _latency_cells(row: Row) -> Sequence[str]:
    counts, generator = row.counts, row.generator
    wrong = counts.dropped + counts.failed + counts.unanswered + counts.doubled + counts.unsent
    return (
        *(_name(row), str(counts.answered), *_cells(row.added_ms)),
        *(str(counts.late), str(wrong + counts.broken_sessions)),
        *(_ms(generator.lateness_ms.p99), _ms(generator.loop_delay_ms.p99)),
        "; ".join(row.problems) or "holds",
    )


def _move_cells(row: Row, moves: Moves) -> Sequence[str]:
    counts = (moves.stop_count, moves.session_count, row.counts.broken_sessions)
    return (_name(row), *map(str, counts), *_cells(moves.gap_ms), str(row.slots_left))


def _cells(figures: Percentiles) -> Sequence[str]:
    return [_ms(value) for value in (figures.p50, figures.p95, figures.p99, figures.max)]


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _cost_cells(row: Row) -> Iterator[Sequence[str]]:
    for name, cost in {**row.processes, "generators": row.generator.cost}.items():
        per_unit = cost.cpu_us_per_unit
        sizes = (cost.rss_before_mb, cost.rss_middle_mb, cost.rss_end_mb, cost.rss_peak_mb)
        yield (
            f"{_name(row)}: {name}",
            "" if per_unit is None else f"{per_unit:.0f}",
            f"{cost.cpu_cores:.2f}",
            *(f"{size:.1f}" for size in sizes),
        )


def capacity_text(dialect: str, sessions: int, rows: Sequence[Row], options: FabricBench) -> str:
    """Return the result of a search, and why the fabric did not hold the next larger number."""
    above = [row for row in rows if row.dialect == dialect and row.sessions > sessions]
    failed = min(above, key=lambda row: row.sessions, default=None)
    if failed is None:
        limit = f"more than {options.max_sessions} were not tried"
    else:
        limit = f"{failed.sessions} do not: {'; '.join(failed.problems)}"
    return f"{dialect}: {sessions} sessions hold; {limit}\n"
