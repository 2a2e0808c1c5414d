"""The check of resumable calls: every fault of the events is counted once, by its name."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from duplane.tools.bench.returns.units import Faults, Units

FIRST, STEP = 19, 12  # sizes of the context
SENT = 4


def checked(events: Sequence[tuple[int, ...]]) -> Faults:
    """Return the faults of events (unit, part), with the context if it is not the right one."""
    units = Units(FIRST, STEP)
    for second in range(SENT):
        units.sent(second)
    for unit, part, *context in events:
        right = FIRST + STEP * unit
        units.event(unit, part, context[0] if context else right, 0, 10.0)
    return units.end()


GOOD = [(0, 0), (0, 1), (1, 0), (2, 0), (3, 0), (3, 1)]


def test_good_call_has_no_faults() -> None:
    assert checked(GOOD) == Faults()


@pytest.mark.parametrize(
    ("events", "faults"),
    [
        ([*GOOD[:3], *GOOD[4:]], Faults(units_lost=1)),
        (GOOD[:-2], Faults(units_lost=1)),
        ([*GOOD[:2], (0, 1), *GOOD[2:]], Faults(units_doubled=1)),
        ([*GOOD[:4], (1, 0), *GOOD[4:]], Faults(units_doubled=1)),
        ([(0, 0), (0, 2), *GOOD[2:]], Faults(units_lost=1)),
        ([(0, 1), *GOOD[2:]], Faults(units_lost=1)),
        ([*GOOD, (4, 0)], Faults(units_doubled=1)),
        ([(0, 0), (1, 0, FIRST), (2, 0), (3, 0)], Faults(out_of_order=1)),
    ],
)
def test_fault_is_counted(events: Sequence[tuple[int, ...]], faults: Faults) -> None:
    assert checked(events) == faults


def test_context_of_an_unknown_model_is_not_checked() -> None:
    units = Units()
    units.sent(0.0)
    units.event(0, 0, 1234, 0, 0.0)
    assert units.end() == Faults()


def test_times_and_dropped_units_are_kept() -> None:
    units = Units()
    units.sent(1.0)
    assert not units.has_last.is_set()
    units.returned(3.0)
    units.event(0, 0, 0, 2, 3.5)
    units.event(0, 1, 0, 0, 4.0)
    assert units.has_last.is_set()
    assert (units.latencies_s, units.answers_s) == ([2.5], [0.5])
    assert units.end() == Faults(units_dropped=2)


def test_dropped_unit_is_not_lost() -> None:
    units = Units(FIRST, STEP)
    for second in range(3):
        units.sent(second)
    units.event(0, 0, FIRST, 0, 0.0)
    units.event(2, 0, FIRST + STEP, 1, 2.0)
    assert units.end() == Faults(units_dropped=1)


def test_input_that_the_client_no_longer_has_is_not_expected() -> None:
    units = Units(FIRST, STEP)
    for second in range(4):
        units.sent(second)
    units.event(0, 0, FIRST, 0, 0.5)
    units.returned(20.0, 2)
    units.event(1, 0, FIRST + STEP, 0, 20.5)
    assert units.has_last.is_set()
    assert units.latencies_s == [0.5, 17.5]
    assert units.end() == Faults()


def test_input_that_neither_side_has_is_counted_from_what_the_server_says() -> None:
    units = Units(FIRST, STEP)
    for second in range(6):
        units.sent(second)
    units.event(0, 0, FIRST, 0, 0.5)
    units.resumed(0, 3)  # units 1 and 2 are lost
    assert units.lost_count == 2
    units.returned(20.0, units.lost_count)
    units.event(1, 0, FIRST + STEP, 0, 20.5)
    units.resumed(1, 4)
    assert units.lost_count == 0
    units.resumed(1, 5)
    assert units.lost_count == 1
    units.returned(30.0, units.lost_count)
    units.event(2, 0, FIRST + 2 * STEP, 0, 30.5)
    assert units.end() == Faults()


def test_faults_add_up() -> None:
    faults = Faults(1, 2, 3, 4, 5)
    faults.add(Faults(10, 10, 10, 10, 10))
    assert faults == Faults(11, 12, 13, 14, 15)
