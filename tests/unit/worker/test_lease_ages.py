"""Ages of leases, computed from fencing numbers and compared with histories of known times."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from duplane.worker.lease_ages import LeaseAges

DELAY_S = 5.0  # longest delay of a message
INTERVAL_S = 2.0


def test_lease_is_as_old_as_the_first_number_that_is_not_below_it() -> None:
    ages = LeaseAges()
    ages.register(10, 100.0)
    ages.progress(20, 110.0)
    ages.progress(30, 120.0)
    found = [ages.age_s(10, number, 130.0) for number in (10, 11, 20, 21, 30, 31)]
    assert found == [30.0, 20.0, 20.0, 10.0, 10.0, 0.0]
    assert ages.age_s(11, 12, 130.0) is None


def test_repeated_registration_changes_nothing() -> None:
    ages = LeaseAges()
    ages.register(10, 100.0)
    ages.register(10, 200.0)
    assert ages.age_s(10, 5, 300.0) == 200.0
    assert ages.age_s(10, 15, 300.0) == 0.0


def test_no_lease_is_granted_after_the_end_of_its_registration() -> None:
    ages = LeaseAges()
    ages.register(10, 100.0)
    ages.detach(200.0)
    ages.detach(250.0)
    ages.progress(500, 260.0)
    ages.register(20, 300.0)
    assert ages.age_s(10, 2**60, 400.0) == 200.0
    assert ages.age_s(20, 21, 400.0) == 0.0


def test_numbers_that_come_at_a_high_rate_do_not_shorten_the_memory() -> None:
    ages = LeaseAges()
    ages.register(0, 0.0)
    for number in range(1, 100_000):
        ages.progress(number, number / 1000)
    age_s = ages.age_s(0, 1_000, 100.0)
    assert age_s
    assert 90 <= age_s <= 99


@given(
    grants=st.lists(st.floats(0, 600), max_size=20),
    sends=st.lists(st.tuples(st.floats(0, 600), st.floats(0, DELAY_S)), max_size=60),
    now=st.floats(0, 700),
)
def test_no_lease_is_taken_for_older_than_it_is(
    grants: list[float], sends: list[tuple[float, float]], now: float
) -> None:
    ages = LeaseAges()
    granted_at = sorted(grants)
    ages.register(0, 0.0)
    arrivals = [(sent + delay, sum(at <= sent for at in granted_at)) for sent, delay in sends]
    for arrived, reached in sorted(arrivals):
        if arrived <= now:
            ages.progress(reached, arrived)
    for number, at in enumerate(granted_at, 1):
        if at <= now:
            age_s = ages.age_s(0, number, now)
            assert age_s is not None
            assert age_s <= now - at


@given(phase=st.floats(0, INTERVAL_S), at=st.floats(0, 600), age=st.floats(0, 90))
def test_age_is_known_to_a_few_seconds_while_the_worker_is_attached(
    phase: float, at: float, age: float
) -> None:
    ages = LeaseAges()
    now = at + age
    ages.register(0, 0.0)
    sent = phase
    while sent <= now:
        ages.progress(1 + int(1000 * sent), sent)  # a thousand grants a second
        sent += INTERVAL_S
    age_s = ages.age_s(0, 1 + int(1000 * at), now)
    assert age_s is not None
    assert age - 2 * INTERVAL_S - 0.01 <= age_s <= age + 0.01
