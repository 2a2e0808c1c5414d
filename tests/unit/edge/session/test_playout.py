"""The playout of speech: a client that has nothing to play during a turn hears a gap."""

from __future__ import annotations

from duplane.edge.session.playout import Playout

DELAY_S = 0.25


def test_first_delta_of_a_turn_is_played_after_the_delay() -> None:
    playout = Playout(DELAY_S)
    assert playout.add(1.0, now_s=10.0) == (None, 0.0)
    assert playout.add(1.0, now_s=11.25) == (1.25, 0.0), "its buffer lasts until 11.25"


def test_late_delta_is_an_underrun_of_its_lateness() -> None:
    playout = Playout(DELAY_S)
    playout.add(1.0, now_s=10.0)
    assert playout.add(1.0, now_s=11.5) == (1.5, 0.25)
    assert playout.add(1.0, now_s=12.5) == (1.0, 0.0), "the delay is not waited for again"
    assert playout.add(1.0, now_s=14.0) == (1.5, 0.5)


def test_early_deltas_fill_the_buffer() -> None:
    playout = Playout(DELAY_S)
    for number in range(4):
        playout.add(1.0, now_s=10.0 + number / 2)
    assert playout.add(1.0, now_s=14.25).stalled_s == 0.0
    assert playout.add(1.0, now_s=16.0).stalled_s == 0.75


def test_pause_between_two_turns_is_no_gap() -> None:
    playout = Playout(DELAY_S)
    playout.add(1.0, now_s=10.0)
    playout.end_turn()
    assert playout.add(1.0, now_s=20.0) == (None, 0.0)
