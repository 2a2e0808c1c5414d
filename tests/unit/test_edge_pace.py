"""How fast units may go on."""

from __future__ import annotations

import pytest

from duplane.edge.pace import Pace


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
