"""The figures of a row: percentiles, costs of processes, and whether the row holds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from duplane.tools.bench.load.ledger import Counts, Timed
from duplane.tools.bench.load.reports import LoadFigures, Report
from duplane.tools.bench.load.row import (
    GeneratorCost,
    Limits,
    Moves,
    Percentiles,
    ProcessCost,
    ProcessSample,
    Stop,
    generator_cost,
    moves_of,
    problems,
    process_cost,
)

LIMITS = Limits(added_ms=100.0, lateness_ms=20.0)
COST = ProcessCost(1.0, 0.1, 1.0, 1.0, 1.0, 1.0)
PUNCTUAL = GeneratorCost(Percentiles.of([1.0]), Percentiles.of([1.0]), COST, is_punctual=True)
FINE = Percentiles.of([5.0])


def test_percentiles_are_values_that_occurred() -> None:
    assert Percentiles.of([float(one) for one in range(101)]) == Percentiles(50, 95, 99, 100)
    assert Percentiles.of([7.0]) == Percentiles(7, 7, 7, 7)
    assert Percentiles.of([]) == Percentiles(None, None, None, None)


def samples() -> list[ProcessSample]:
    """Return one sample per second: half a core of CPU time, and 100 MB plus 1 MB per second."""
    return [ProcessSample(float(at), (100 + at) * 1_000_000, at / 2) for at in range(21)]


def test_cost_of_a_process_is_that_of_the_measured_seconds() -> None:
    cost = process_cost(samples(), 4.0, 20.0, units=80)
    assert cost.cpu_cores == 0.5
    assert cost.cpu_us_per_unit == 100_000.0
    assert (cost.rss_before_mb, cost.rss_peak_mb) == (100.0, 120.0)
    assert 112 < cost.rss_middle_mb < cost.rss_end_mb <= 120


def test_cost_without_units_or_samples_in_the_window_is_unknown() -> None:
    assert process_cost(samples(), 4.0, 20.0, units=0).cpu_us_per_unit is None
    assert process_cost(samples()[:1], 4.0, 20.0, units=3).cpu_cores == 0.0


@pytest.mark.parametrize(
    ("lateness", "loop", "is_punctual"),
    [(19.0, 19.0, True), (21.0, 1.0, False), (1.0, 21.0, False)],
)
def test_generator_is_punctual_if_sending_and_loop_are(
    lateness: float, loop: float, is_punctual: bool
) -> None:
    seen = LoadFigures()
    seen.add(0, Report(lateness_ms=[lateness], loop_ms=[loop]))
    assert generator_cost(seen, COST, LIMITS).is_punctual is is_punctual


def test_row_that_keeps_every_limit_holds() -> None:
    assert not problems(Counts(sent=3, answered=3), FINE, PUNCTUAL, LIMITS)


@pytest.mark.parametrize(
    ("counts", "problem"),
    [
        (Counts(late=3, late_by_generator=1), "2 units late"),
        (Counts(dropped=1), "1 units dropped"),
        (Counts(failed=1), "1 units failed"),
        (Counts(unanswered=1), "1 units unanswered"),
        (Counts(doubled=1), "1 units answered twice"),
        (Counts(unsent=1), "1 units without a session"),
        (Counts(broken_sessions=2), "2 sessions broke"),
    ],
)
def test_every_fault_is_named(counts: Counts, problem: str) -> None:
    assert problems(counts, FINE, PUNCTUAL, LIMITS) == [problem]


def test_late_answers_are_excused_by_the_generators_own_delay() -> None:
    assert not problems(Counts(late=2, late_by_generator=2), FINE, PUNCTUAL, LIMITS)


def test_limits_and_a_late_generator_are_named() -> None:
    slow = Percentiles.of([101.0])
    assert problems(Counts(), slow, PUNCTUAL, LIMITS) == ["p99 over 100 ms"]
    assert problems(Counts(), Percentiles.of([]), PUNCTUAL, LIMITS) == ["no unit was answered"]
    (problem,) = problems(Counts(), FINE, replace(PUNCTUAL, is_punctual=False), LIMITS)
    assert problem.startswith("invalid: the generator was over 20 ms late")


def timed(session: int, answered_s: float, latency_ms: float) -> Timed:
    return Timed(latency_ms, None, session, answered_s)


def test_gap_is_that_of_the_first_unit_after_the_stop() -> None:
    answers = [
        timed(0, 9.9, 5000.0),  # before the stop
        *(timed(0, 10.8, 700.0), timed(0, 10.9, 2.0), timed(1, 10.3, 3.0), timed(2, 12.0, 900.0)),
        *(timed(0, 20.5, 4.0), timed(1, 21.0, 40.0), timed(2, 20.2, 1.0)),
    ]
    moves = moves_of([Stop(10.0, 2), Stop(20.0, 1)], answers, is_killed=True)
    assert (moves.stop_count, moves.session_count) == (2, 3)
    assert moves.gap_ms == Percentiles.of([900.0, 700.0, 40.0])


def test_units_may_be_late_while_sessions_move_but_not_for_long() -> None:
    slow = Percentiles.of([1500.0])
    late = Counts(late=5)
    killed = Moves(is_killed=True, stop_count=1, session_count=1, gap_ms=slow)
    assert not problems(late, slow, PUNCTUAL, LIMITS, killed)
    too_slow = Percentiles.of([3001.0])
    long = replace(killed, gap_ms=too_slow)
    assert problems(late, slow, PUNCTUAL, LIMITS, long) == ["gap over 3 s"]
    lost = Counts(broken_sessions=1)
    assert problems(lost, slow, PUNCTUAL, LIMITS, killed) == ["1 sessions broke"]


def test_no_unit_may_be_late_because_a_worker_is_restarted() -> None:
    slow = Percentiles.of([1500.0])
    restarted = Moves(is_killed=False, stop_count=1, session_count=1, gap_ms=slow)
    found = problems(Counts(late=5), slow, PUNCTUAL, LIMITS, restarted)
    assert found == ["p99 over 100 ms", "5 units late"]


def test_reports_of_several_generators_are_one() -> None:
    seen = LoadFigures()
    for generator, sent in ((0, 1), (1, 2), (0, 5)):  # counts are those since the start
        seen.add(generator, Report(lateness_ms=[1.0], counts=Counts(sent=sent), failures={"x": 1}))
    assert seen.counts.sent == 7
    assert seen.lateness_ms == [1.0] * 3
    assert seen.failures == {"x": 2}
