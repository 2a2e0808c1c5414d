"""How fast units may go on, and how much work a client may make."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duplane.edge.pace import Pace, Share


def spend_all(pace: Pace, now_s: float) -> int:
    count = 0
    while pace.due_s <= now_s:
        pace.spend(now_s)
        count += 1
    return count


@pytest.mark.parametrize(("per_s", "burst"), [(2.0, 10), (0.5, 2), (0.1, 1)])
def test_five_seconds_worth_may_go_at_once_then_the_rate_holds(per_s: float, burst: int) -> None:
    pace = Pace(per_s)
    assert spend_all(pace, 1000.0) == burst
    assert pace.due_s == pytest.approx(1000 + 1 / per_s - max(0, 5 - burst / per_s))
    sent = sum(spend_all(pace, 1000.0 + second) for second in range(1, 101))
    assert sent == pytest.approx(100 * per_s, abs=1)


def test_a_client_at_its_rate_is_never_held() -> None:
    pace = Pace(1.0)
    for second in range(100):
        assert pace.due_s <= second
        pace.spend(second)


def test_work_above_its_share_is_waited_for_and_a_little_may_be_done_at_once() -> None:
    share = Share(0.05)
    assert share.spend(100.0, 0.05) == 0.0
    assert share.spend(100.0, 0.01) == pytest.approx(0.2)
    assert share.spend(100.2, 0.01) == pytest.approx(0.2)
    assert share.spend(200.0, 0.05) == 0.0  # what was not used for long may be used at once


@given(st.lists(st.floats(0.0, 0.1), min_size=1, max_size=50), st.floats(0.001, 1.0))
def test_work_that_waits_as_told_is_its_share_and_no_less(works: list[float], part: float) -> None:
    share, now_s = Share(part), 0.0
    for work_s in works:
        now_s += share.spend(now_s, work_s)
    assert now_s == pytest.approx(max(0.0, (sum(works) - 0.05) / part), abs=1e-6)
