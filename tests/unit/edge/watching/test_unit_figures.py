"""Figures of units: percentiles, bounds, and the stage that made a unit late."""

from __future__ import annotations

import pytest

from duplane.edge.watching.unit_figures import (
    MAX_LATE_UNITS,
    SAMPLE_COUNT,
    STEP_S,
    LateUnit,
    UnitFigures,
    longest_stage,
)
from duplane.fabric.durations import to_duration
from duplane.fabric.v1 import session_pb2

NOW_S = 1_714_200_000.0


def test_percentiles_of_a_step_are_those_of_its_units() -> None:
    figures = UnitFigures()
    for index in range(100):
        figures.answered(0.001 * (index + 1), NOW_S, is_late=False)
    figures.answered(1.6, NOW_S + STEP_S, is_late=True)
    first, second = figures.samples(NOW_S + 2 * STEP_S)
    assert first.p50_ms == pytest.approx(50, abs=1)
    assert first.p95_ms == pytest.approx(95, abs=1)
    assert (first.unit_count, first.late_count) == (100, 0)
    assert first.at_s == NOW_S + STEP_S
    assert (second.unit_count, second.late_count) == (1, 1)
    assert second.p95_ms is not None
    assert 1500 <= second.p95_ms <= 2000


def test_step_that_has_not_ended_is_no_sample() -> None:
    figures = UnitFigures()
    figures.answered(0.1, NOW_S, is_late=False)
    assert figures.samples(NOW_S) == []
    assert figures.sample(int(NOW_S / STEP_S) + 1).unit_count == 0


def test_unit_longer_than_all_classes_counts_in_the_last() -> None:
    figures = UnitFigures()
    figures.answered(60.0, NOW_S, is_late=True)
    [sample] = figures.samples(NOW_S + STEP_S)
    assert sample.p50_ms == 5000


def test_memory_of_the_figures_is_bounded() -> None:
    figures = UnitFigures()
    for index in range(2 * SAMPLE_COUNT):
        figures.answered(0.1, NOW_S + index * STEP_S, is_late=False)
        figures.late(LateUnit("sess_1", "w", index, NOW_S, 1200.0, "edge", 1100.0))
    assert len(figures.samples(NOW_S + 2 * SAMPLE_COUNT * STEP_S)) == SAMPLE_COUNT
    last = figures.last_number
    kept = figures.late_units(0, last)
    assert [unit.sequence for unit in kept][-1] == 2 * SAMPLE_COUNT - 1
    assert len(kept) == MAX_LATE_UNITS
    assert len(figures.late_units(last - 2, last)) == 2
    assert figures.late_units(last - 2, last - 1) == kept[-2:-1]


def test_clock_that_is_set_back_loses_no_unit() -> None:
    figures = UnitFigures()
    figures.answered(0.1, NOW_S, is_late=False)
    figures.answered(0.1, NOW_S - 3600, is_late=False)
    [sample] = figures.samples(NOW_S + STEP_S)
    assert sample.unit_count == 2


@pytest.mark.parametrize(
    ("taken_s", "edge_s", "move_s", "stages", "expected"),
    [
        (1.5, 1.2, 0.0, {"decode": 0.2}, ("edge", 1.2)),
        (1.5, 0.1, 0.9, {"decode": 0.2}, ("move", 0.9)),
        (1.5, 0.1, 0.0, {"inbox": 0.3, "decode": 0.9, "settle": 2.0}, ("decode", 0.9)),
        (1.5, 0.1, 0.0, {"talker": 0.2, "condition": 0.9}, ("rest", 1.2)),
        (1.5, 0.1, 0.0, {}, ("rest", 1.4)),
    ],
    ids=["edge", "move", "decode", "network", "unknown"],
)
def test_stage_that_took_the_longest_made_the_unit_late(
    taken_s: float,
    edge_s: float,
    move_s: float,
    stages: dict[str, float],
    expected: tuple[str, float],
) -> None:
    times = session_pb2.StageTimes(**{name: to_duration(each) for name, each in stages.items()})
    stage, seconds = longest_stage(taken_s, edge_s, move_s, times)
    assert (stage, pytest.approx(seconds)) == expected
