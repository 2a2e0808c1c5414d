"""How long a ticket is thought to wait."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_world import AUDIO, CHAT, OMNI

from duplane.fabric.v1 import lease_pb2
from duplane.scheduler.estimate import HoldTimes, Outlook, waits_s

ALL = frozenset({AUDIO, OMNI, CHAT})


def test_base_holds_until_the_third_sample() -> None:
    times = HoldTimes()
    assert [times.expected_s(kind) for kind in (AUDIO, OMNI, CHAT)] == [120, 90, 15]
    times.add(AUDIO, 100)
    times.add(AUDIO, 200)
    assert times.expected_s(AUDIO) == 120
    times.add(AUDIO, 300)
    assert times.expected_s(AUDIO) == pytest.approx(0.7 * (0.7 * 100 + 0.3 * 200) + 0.3 * 300)
    assert times.expected_s(OMNI) == 90


def test_untold_kind_is_taken_for_the_longest() -> None:
    assert HoldTimes().expected_s(lease_pb2.SESSION_KIND_UNSPECIFIED) == 120


def test_session_past_its_estimate_is_thought_to_end_soon() -> None:
    times = HoldTimes()
    assert times.remaining_s(AUDIO, 100) == 20
    assert times.remaining_s(AUDIO, 500) == 15


def test_tickets_take_turns_on_the_slots() -> None:
    slots = [Outlook(ALL, 10), Outlook(ALL, 30)]
    assert waits_s([AUDIO] * 4, slots, HoldTimes()) == [10, 30, 130, 150]


def test_short_sessions_ahead_shorten_the_wait() -> None:
    assert waits_s([CHAT, AUDIO], [Outlook(ALL, 5)], HoldTimes()) == [5, 20]


def test_nobody_starts_before_the_one_ahead() -> None:
    slots = [Outlook(frozenset({OMNI}), 60), Outlook(frozenset({CHAT}), 0)]
    assert waits_s([OMNI, CHAT], slots, HoldTimes()) == [60, 60]


def test_wait_for_a_kind_without_slots_is_unknown_and_holds_up_nobody() -> None:
    slots = [Outlook(frozenset({CHAT}), 3)]
    assert waits_s([OMNI, CHAT], slots, HoldTimes()) == [None, 3]


@given(
    st.lists(st.sampled_from([AUDIO, OMNI, CHAT]), max_size=30),
    st.lists(st.floats(0, 600), min_size=1, max_size=8),
)
def test_waits_never_fall_along_the_queue(kinds: list[lease_pb2.SessionKind], free: list[float]):
    waits = waits_s(kinds, [Outlook(ALL, seconds) for seconds in free], HoldTimes())
    known = [wait for wait in waits if wait is not None]
    assert len(known) == len(kinds)
    assert known == sorted(known)
