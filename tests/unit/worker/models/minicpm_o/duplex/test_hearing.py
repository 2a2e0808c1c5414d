"""Which sound a rebuild must hear again."""

from __future__ import annotations

import pytest

from duplane.worker.models.minicpm_o.duplex.hearing import Hearing, HearingError

PERIOD = 29
UNIT = 16_000


def heard(count: int, period: int = PERIOD) -> Hearing:
    """Return the state of a conversation that has heard `count` units."""
    hearing = Hearing(period)
    for number in range(count):
        hearing.push(UNIT)
        hearing.take(number)
    return hearing


@pytest.mark.parametrize(
    ("number", "begin"),
    [(0, 0), (28, 0), (29, 0), (57, 0), (58, 20), (86, 20), (87, 50), (115, 50), (116, 80)],
)
def test_sound_begins_where_the_mel_drops_and_before_the_period(number: int, begin: int) -> None:
    assert number - heard(number + 1).units_before(number) == begin


@pytest.mark.parametrize("period", [1, 7, 29, 40])
@pytest.mark.parametrize("number", range(0, 200, 3))
def test_a_rebuild_that_hears_so_many_units_is_ready(period: int, number: int) -> None:
    begin = number - heard(number + 1, period).units_before(number)
    rebuilt = Hearing(period)
    for before in range(begin):
        rebuilt.skip(before)
    for before in range(begin, number):
        rebuilt.take(before)
    assert rebuilt.is_ready
    rebuilt.take(number)
    assert rebuilt.is_encoding


@pytest.mark.parametrize("begin", [30, 40, 50])
def test_sound_that_begins_later_is_not_enough(begin: int) -> None:
    rebuilt = Hearing(PERIOD)
    for number in range(80):
        if number < begin:
            rebuilt.skip(number)
        else:
            rebuilt.take(number)
    assert not rebuilt.is_ready


def test_units_without_sound_count_between_the_others() -> None:
    hearing = Hearing(PERIOD)
    for number in range(0, 120, 2):  # each second unit has sound: unit 116 is the 58th of these
        hearing.take(number)
    assert 118 - hearing.units_before(118) == 40
    assert 119 - hearing.units_before(119) == 40


def test_sound_must_begin_at_a_drop_and_have_no_gap() -> None:
    hearing = Hearing(PERIOD)
    hearing.skip(0)
    with pytest.raises(HearingError, match="cannot begin"):
        hearing.take(1)
    hearing = heard(3)
    with pytest.raises(HearingError, match="missing"):
        hearing.skip(3)


def test_sound_of_another_length_moves_the_borders_of_units() -> None:
    hearing = heard(2)
    assert hearing.is_regular
    hearing.push(UNIT - 1)
    assert not hearing.is_regular
