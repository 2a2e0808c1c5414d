"""Rows of `duplane bench fabric` for tests."""

from __future__ import annotations

from collections.abc import Sequence

from duplane.tools.bench.load.ledger import Counts
from duplane.tools.bench.load.row import GeneratorCost, Percentiles, ProcessCost, Row


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
