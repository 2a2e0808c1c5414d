"""Rate limits: units, CPU time of a client, events of a network."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duplane.edge.transport.rate_limit import (
    NetworkRates,
    RateLimit,
    cpu_quota,
    failed_logins,
    unit_rate,
)


def spend_all(pace: RateLimit, due_s: float, now_s: float) -> tuple[int, float]:
    """Spend units until the limit demands a wait; return their count and when the next is due."""
    count = 0
    while due_s <= now_s:
        due_s = now_s + pace.spend(now_s)
        count += 1
    return count, due_s


@pytest.mark.parametrize(("per_s", "burst"), [(2.0, 10), (0.5, 2), (0.1, 1)])
def test_five_seconds_worth_may_go_at_once_then_the_rate_holds(per_s: float, burst: int) -> None:
    pace = unit_rate(per_s, unit_s=1.0)
    count, due_s = spend_all(pace, 0.0, 1000.0)
    assert count == burst
    assert due_s == pytest.approx(1000 + 1 / per_s - max(0, 5 - burst / per_s))
    sent = 0
    for second in range(1, 101):
        count, due_s = spend_all(pace, due_s, 1000.0 + second)
        sent += count
    assert sent == pytest.approx(100 * per_s, abs=1)


def test_a_client_at_its_rate_is_never_held() -> None:
    pace = unit_rate(1.0, unit_s=1.0)
    for second in range(100):
        assert pace.spend(second) == 0.0


def test_short_units_may_be_as_fast_in_seconds_of_sound() -> None:
    pace = unit_rate(2.0, unit_s=0.08)  # twice as fast as real time
    count, due_s = spend_all(pace, 0.0, 1000.0)
    assert count == 125
    assert due_s == pytest.approx(1000 + 0.04)


def test_work_above_its_share_is_waited_for_and_a_little_may_be_done_at_once() -> None:
    share = cpu_quota(0.05)
    assert share.spend(100.0, 0.05) == 0.0
    assert share.spend(100.0, 0.01) == pytest.approx(0.2)
    assert share.spend(100.2, 0.01) == pytest.approx(0.2)
    assert share.spend(200.0, 0.05) == 0.0  # quota that was saved may be used in one burst


@given(st.lists(st.floats(0.0, 0.1), min_size=1, max_size=50), st.floats(0.001, 1.0))
def test_work_that_waits_as_told_is_its_share_and_no_less(works: list[float], part: float) -> None:
    share = cpu_quota(part)
    now_s = 0.0
    for work_s in works:
        now_s += share.spend(now_s, work_s)
    assert now_s == pytest.approx(max(0.0, (sum(works) - 0.05) / part), abs=1e-6)


def test_each_network_has_its_own_burst_and_rate() -> None:
    rates = NetworkRates(2.0, 4.0)
    assert [rates.spend("a", 10.0) for _ in range(4)] == [0.0] * 4
    assert rates.spend("a", 10.0) == pytest.approx(0.5)
    assert rates.spend("b", 10.0) == 0.0
    assert rates.wait_s("a", 10.25) == pytest.approx(0.25)
    assert rates.spend("a", 10.5) == 0.0  # what was refused did not count
    assert rates.spend("a", 10.5) == pytest.approx(0.5)


def test_ten_logins_may_fail_in_a_minute() -> None:
    rates = failed_logins()
    assert [rates.spend("a", 0.0) for _ in range(10)] == [0.0] * 10
    assert rates.wait_s("a", 0.0) == pytest.approx(6.0)
    assert rates.wait_s("a", 6.0) == 0.0
    assert [rates.spend("a", 60.0) for _ in range(10)] == [0.0] * 10


def test_oldest_network_is_forgotten_first() -> None:
    rates = NetworkRates(1.0, 1.0)
    for name in ("old", "new", *map(str, range(9_999))):
        assert rates.spend(name, 0.0) == 0.0
    assert rates.wait_s("new", 0.0) == 1.0
    assert rates.wait_s("old", 0.0) == 0.0
