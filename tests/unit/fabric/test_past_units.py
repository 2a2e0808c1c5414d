"""Which sound and pictures of past units are kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duplane.fabric.past_units import PastUnits, past_unit
from duplane.fabric.v1 import session_pb2

UNIT_BYTES = 1_000


def past(number: int, **reach: int) -> session_pb2.PastUnit:
    """Return a unit with sound, a picture and ids; without `reach` all units are needed."""
    unit = session_pb2.Unit(sequence=number, audio=bytes(2 * UNIT_BYTES), video_frames=[b"frame"])
    unit.max_slice_count = 2
    delta = session_pb2.Delta(token_ids=[number], rebuild_state=b"state", context_token_count=9)
    if reach:
        delta.reach.CopyFrom(session_pb2.UnitReach(**reach))
    return past_unit(unit, delta)


def units_of(count: int, context: int, sound: int = 0, turn: int = 0) -> PastUnits:
    """Return units whose contexts have at most `context` units."""
    units = PastUnits()
    for number in range(count):
        units.append(
            past(
                number,
                row_count=13,
                context_unit_count=min(context, number + 1),
                sound_unit_count=min(sound, number),
                turn_unit_count=turn,
            )
        )
    return units


def test_units_before_the_contexts_keep_only_their_ids() -> None:
    units = units_of(100, context=5, sound=10)
    begin = next(units.begins(3))
    assert begin == 99 - 4 * 4  # each context has 4 units before its last one
    units.drop_before(begin)
    old, heard, fed = units.units[72], units.units[73], units.units[83]
    assert (old.audio_int16, old.row_count, old.had_sound, old.token_ids) == (b"", 13, True, [72])
    assert (old.rebuild_state, old.context_token_count) == (b"state", 9)
    assert (len(heard.audio_int16), heard.row_count) == (UNIT_BYTES, 13)
    assert (len(fed.audio_int16), fed.row_count) == (UNIT_BYTES, 0)
    for unfed in (old, heard):
        assert not unfed.video_frames
        assert not unfed.HasField("max_slice_count")
    assert (list(fed.video_frames), fed.max_slice_count) == ([b"frame"], 2)


def test_the_contexts_are_counted_from_the_begin_of_the_open_turn() -> None:
    begins = list(units_of(200, context=5, turn=40).begins(3))
    turn, last = 160, 199
    assert begins == [
        *(turn - 4 * (count + 1) for count in (3, 2)),
        *(last - 4 * (count + 1) for count in (3, 2)),
    ]


def test_without_a_reach_everything_is_kept() -> None:
    units = PastUnits()
    for number in range(50):
        units.append(past(number))
    assert set(units.begins(8)) == {0}
    for number in range(50, 200):  # the rows of the first units stay unknown
        units.append(past(number, row_count=13, context_unit_count=2))
    assert set(units.begins(8)) == {0}


def test_units_before_one_without_a_reach_are_dropped_no_further() -> None:
    units = units_of(100, context=5)
    units.drop_before(next(units.begins(8)))
    fed_from = units.fed_from
    units.append(past(100))
    assert set(units.begins(8)) == {fed_from}


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 70), st.integers(0, 9)), min_size=1))
def test_memory_is_what_is_kept_and_a_copy_continues_in_the_same_way(
    reaches: list[tuple[int, int, int]],
) -> None:
    units, copy = PastUnits(), PastUnits()
    for number, (context, sound, turn) in enumerate(reaches):
        unit = past(
            number,
            row_count=7,
            context_unit_count=min(context, number + 1),
            sound_unit_count=min(sound, number),
            turn_unit_count=min(turn, number + 1),
        )
        units.append(unit)
        units.drop_before(next(units.begins(2)))
    for unit in units.units:
        copy.append(unit)
    assert (copy.byte_count, copy.fed_from) == (units.byte_count, units.fed_from)
    assert copy.heard_from == units.heard_from
    sounds = [len(unit.audio_int16) > 0 for unit in units.units]
    assert sounds == [number >= units.heard_from for number in range(len(sounds))]
    unfed = [unit.row_count > 0 for unit in units.units]
    assert unfed == [number < units.fed_from for number in range(len(unfed))]
    units.clear()
    assert (units.byte_count, units.fed_from, units.heard_from) == (0, 0, 0)


@pytest.mark.parametrize("window_count", [0, 1, 2])
def test_small_numbers_of_contexts_are_kept_as_they_are(window_count: int) -> None:
    begins = list(units_of(50, context=5).begins(window_count))
    assert begins == [49 - 4 * (window_count + 1)] * 2
