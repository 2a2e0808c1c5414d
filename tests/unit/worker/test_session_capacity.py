"""The capacity follows the latency of speech, and keeps simulated devices in time."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from duplane.tools.bench.report import percentile
from duplane.tools.bench.schedule.costs import BUILT_IN, Computed
from duplane.tools.bench.schedule.run import capacity_of, simulate
from duplane.tools.bench.schedule.simulation import is_spoken
from duplane.tools.bench.schedule.traffic import Traffic, mixed
from duplane.worker.session_capacity import SURE_COUNT, WINDOW_S, SessionCapacity

LIMIT_S = 0.4
H100 = BUILT_IN["h100"]
SLOW_HOST = replace(BUILT_IN["h200"], host_ms=5.0)


def noted(*units: tuple[float, int], capacity: SessionCapacity | None = None) -> SessionCapacity:
    """Note these latencies and numbers of sessions, two seconds apart."""
    capacity = capacity or SessionCapacity(LIMIT_S)
    for number, (latency_s, sessions) in enumerate(units):
        capacity.note(latency_s, sessions, 2.0 * number)
    return capacity


def test_without_units_all_sessions_are_taken() -> None:
    assert SessionCapacity(LIMIT_S).count == math.inf
    assert SessionCapacity(LIMIT_S).expected_s == 0


def test_capacity_is_in_proportion_to_the_measured_latency() -> None:
    capacity = noted((0.16, 20))
    assert capacity.expected_s == pytest.approx(0.2)
    assert capacity.count == pytest.approx(40)


def test_few_fast_sessions_do_not_hinder_others() -> None:
    assert noted((0.3, 1)).count == 1 + SURE_COUNT


def test_above_the_limit_fewer_sessions_are_taken_but_at_least_one() -> None:
    assert noted((0.64, 10)).count == pytest.approx(5)
    assert noted((9.0, 1)).count == 1


def test_old_units_are_forgotten() -> None:
    capacity = noted((9.0, 10))
    capacity.note(0.16, 10, WINDOW_S + 1)
    assert capacity.count == pytest.approx(20)


def test_one_slow_unit_of_many_changes_little() -> None:
    units = [(0.16, 10)] * 60
    units[30] = (2.0, 10)
    capacity = SessionCapacity(LIMIT_S)
    for number, (latency_s, sessions) in enumerate(units):
        capacity.note(latency_s, sessions, number / 4)
    assert capacity.count == pytest.approx(20)


def test_no_limit_takes_all_sessions_and_still_measures() -> None:
    capacity = noted((9.0, 10), capacity=SessionCapacity(math.inf))
    assert capacity.count == math.inf
    assert capacity.expected_s > 9


@pytest.mark.slow
@pytest.mark.parametrize("costs", [H100, SLOW_HOST], ids=["h100", "slow host"])
@pytest.mark.parametrize("load", [Traffic, mixed])
def test_as_many_sessions_as_the_capacity_stay_near_the_limit(costs: Computed, load: type) -> None:
    """Many sessions wait, so that the device always has as many as its worker takes."""
    sessions, most = 1, 0
    for _ in range(7):
        outcome = simulate(costs, load(sessions, 0.8, 20.0), lanes=2, seed=1)
        assert outcome.late == 0
        latencies = outcome.latencies(is_spoken)
        assert percentile(latencies, 0.99) < 1.25 * 0.45
        sessions = int(capacity_of(outcome, sessions))
        most = max(most, sessions)
    assert most >= 14
