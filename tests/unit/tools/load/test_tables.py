"""The tables of `duplane bench fabric` show each row and process, and why a row does not hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from duplane.tools.bench.load.ledger import Counts, Timed
from duplane.tools.bench.load.reports import LoadFigures, Report
from duplane.tools.bench.load.row import GeneratorCost, Percentiles, ProcessCost, Row
from duplane.tools.bench.load.tables import capacity_text, progress_text, show_rows
from duplane.tools.bench.options import FabricBench


def row(
    dialect: str,
    sessions: int,
    added_ms: float = 2.0,
    cpu_us: float | None = 900.0,
    problems: Sequence[str] = (),
) -> Row:
    """Return the load results of one process. p50 and p95 are `added_ms`, p99 is twice that."""
    figures = Percentiles(added_ms, added_ms, added_ms * 2, added_ms * 3)
    cost = ProcessCost(cpu_us, 0.1, 1.0, 1.0, 1.0, 1.0)
    return Row(
        dialect=dialect,
        sessions=sessions,
        phases="spread",
        seconds=1.0,
        latency_ms=figures,
        added_ms=figures,
        is_worker_time_known=True,
        counts=Counts(),
        failures={},
        slots_left=0,
        processes={"edge": cost},
        generator=GeneratorCost(figures, figures, cost, is_punctual=True),
        problems=problems,
    )


def test_tables_have_a_line_for_each_row_and_process(capsys: pytest.CaptureFixture[str]) -> None:
    bad = replace(row("B", 50, problems=["3 units late"]), counts=Counts(answered=9, late=3))
    show_rows([replace(row("B", 1), phases="step"), bad])
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("B, 1 in step ") and line.endswith("holds")]
    (line,) = [line for line in lines if line.endswith("3 units late")]
    assert line.split()[:9] == ["B,", "50", "9", "2.0", "2.0", "4.0", "6.0", "3", "0"]
    (cost,) = [line for line in lines if line.startswith("B, 50: edge")]
    assert cost.split()[3:5] == ["900", "0.10"]
    assert sum(": generators" in line for line in lines) == 2


def test_capacity_names_why_the_next_number_does_not_hold() -> None:
    rows = [row("B", 8), row("B", 16, problems=["p99 over 100 ms"]), row("C", 9, problems=["x"])]
    rows.append(row("B", 12, problems=["2 units late", "1 sessions broke"]))
    options = FabricBench(max_sessions=16)
    assert capacity_text("B", 8, rows, options) == (
        "B: 8 sessions hold; 12 do not: 2 units late; 1 sessions broke\n"
    )
    assert capacity_text("B", 16, rows, options) == (
        "B: 16 sessions hold; more than 16 were not tried\n"
    )


def report(answered: int, added_ms: float, late_ms: float) -> Report:
    timed = [Timed(latency_ms=5.0 + added_ms, worker_ms=5.0)]
    return Report(timed, [late_ms], [late_ms], Counts(answered=answered, dropped=2))


def test_progress_shows_all_counts_and_the_times_since_the_last_line() -> None:
    seen = LoadFigures()
    seen.add(0, report(answered=1, added_ms=900.0, late_ms=80.0))
    seen.take_recent()
    seen.add(0, report(answered=2, added_ms=2.0, late_ms=0.5))
    assert progress_text("B", 5, seen.counts, seen.take_recent()) == (
        "B, 5 sessions: 2 units answered, 0 late, 2 wrong; since the last line added p50 2.0 ms,"
        " p99 2.0 ms, generator p99 0.5 ms late"
    )
    assert [one.added_ms for one in seen.timed] == [900.0, 2.0]
