"""The bytes of a unit's state: exact, compact, and refused with a reason if they are broken."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duplane.worker.models.minicpm_o.duplex.rebuild_state import (
    MAX_IDS,
    MAX_NUMBER,
    StateError,
    decode,
    encode,
)
from duplane.worker.models.types import MAX_SPEECH_REQUESTS, StateChange

IDS = st.lists(st.integers(0, MAX_NUMBER), max_size=40).map(tuple)
FLAG = st.booleans()
REQUESTS = st.lists(st.tuples(st.integers(0, MAX_NUMBER), IDS), max_size=MAX_SPEECH_REQUESTS).map(
    tuple
)
NUMBERS = st.integers(0, MAX_NUMBER)
CHANGES = st.builds(StateChange, IDS, IDS, NUMBERS, FLAG, FLAG, FLAG, REQUESTS, NUMBERS)


@given(CHANGES)
def test_a_state_is_read_as_it_was_written(change: StateChange) -> None:
    assert decode(encode(change)) == change


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(state: bytes) -> None:
    try:
        change = decode(state)
    except StateError:
        return
    assert decode(encode(change)) == change


@given(CHANGES, st.data())
def test_a_state_that_is_cut_off_or_too_long_is_refused(
    change: StateChange, data: st.DataObject
) -> None:
    state = encode(change)
    cut = data.draw(st.integers(0, len(state) - 1))
    for broken in (state[:cut], state + b"\0"):
        with pytest.raises(StateError):
            decode(broken)


def test_the_state_of_a_speaking_unit_is_small() -> None:
    ids = tuple(range(151_000, 151_020))
    state = encode(StateChange(tuple(range(6000, 6025)), ids, 90))
    assert len(state) < 130


def test_without_requests_and_a_limit_the_state_is_that_of_older_workers() -> None:
    assert encode(StateChange((7,), (300,), 4, interrupted_turn=True)) == bytes(
        (1, 1, 4, 1, 7, 1, 0xAC, 2)
    )


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (b"", "version of the state is absent"),
        (b"\x02\0\0\0\0", "version of the state is 2"),
        (b"\x01\x20\0\0\0", "unknown flags"),
        (b"\x01\x08\0\0\0\0", "0 requests"),
        (b"\x01\x08\0\0\0\x09", "9 requests"),
        (b"\x01\0\xff\xff\xff\xff\x7f\0\0", "number above"),
        (b"\x01\0\xff\xff\xff\xff\xff\x01\0\0", "too many bytes"),
        (encode(StateChange((0,) * (MAX_IDS + 1))), "more than 4096"),
    ],
)
def test_a_refusal_says_why(state: bytes, reason: str) -> None:
    with pytest.raises(StateError, match=reason):
        decode(state)
