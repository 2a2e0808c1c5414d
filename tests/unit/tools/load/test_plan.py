"""The plan of a load generator: when each session sends, and when a new one replaces it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.tools.load_plan import PLAN

from duplane.tools.bench.load.plan import share


def test_sessions_send_spread_over_the_second_or_in_step() -> None:
    assert [PLAN.phase_s(session) for session in range(4)] == [0.0, 0.25, 0.5, 0.75]
    in_step = replace(PLAN, phases="step")
    assert [in_step.phase_s(session) for session in range(4)] == [0.0] * 4


def test_each_session_is_renewed_once_in_its_length_and_not_with_the_others() -> None:
    renewals = [[at for at in range(24) if PLAN.is_renewed(one, at)] for one in range(4)]
    assert renewals == [[8, 16], [6, 14, 22], [4, 12, 20], [2, 10, 18]]


def test_units_of_the_warm_up_are_not_measured() -> None:
    assert [PLAN.is_measured(number) for number in range(4)] == [False, False, True, True]


@pytest.mark.parametrize(("sessions", "processes"), [(1, 1), (5, 2), (2, 3), (200, 7)])
def test_every_session_belongs_to_one_process(sessions: int, processes: int) -> None:
    shares = share(sessions, processes)
    assert sorted(one for indices in shares for one in indices) == list(range(sessions))
    assert len(shares) == min(sessions, processes)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
