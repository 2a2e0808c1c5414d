"""A conversation that prepares to leave a worker which still answers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.edge.moved_play import LIMITS, LOST, Play

from duplane.edge.clock import Moment
from duplane.edge.close import CloseReason
from duplane.edge.session.continuity import RebuildPermits
from duplane.edge.session.move_table import MoveCause, MoveOutcome, MovePhase
from duplane.edge.session.slot import Slot
from duplane.fabric.v1 import session_pb2


def test_draining_worker_answers_until_the_next_one_is_ready(play: Play) -> None:
    first = play.present
    play.drain()
    play.claim()
    for _ in range(2):
        assert play.read_next()  # open, and the units answered so far
    play.chunk()
    assert play.read()
    assert not play.read_next(), "the former worker has not answered its unit"
    play.settle()
    assert first
    assert first.heard == [0, 1, 2, 3]
    assert play.outcomes[-1] is MoveOutcome.MOVED
    assert play.present is not first
    play.chunk()
    play.settle()
    assert play.present
    assert play.present.requests == ["open", "rebuild", "rebuild", "unit"]
    assert play.present.heard == [0, 1, 2, 3, 4]
    assert play.kinds() == ["result"] * 5


def test_units_wait_only_while_the_last_past_unit_is_rebuilt(play: Play) -> None:
    first = play.present
    play.drain()
    play.claim()
    play.chunk()
    play.read()
    for _ in range(2):
        assert play.read_next()  # open, and the units answered so far
    assert not play.read_next(), "the former worker has not answered its unit"
    play.chunk()
    assert not play.read(), "no worker gets the next unit"
    play.answer()
    assert first
    assert first.heard == [0, 1, 2, 3]
    assert play.read_next()
    assert play.present is not first
    play.settle()
    assert play.present
    assert play.present.heard == [0, 1, 2, 3, 4]


def test_session_changes_its_worker_although_units_come_faster_than_they_are_rebuilt(
    play: Play,
) -> None:
    first = play.present
    play.drain()
    play.claim()
    count = 0
    while play.present is first:
        for _ in range(5):
            play.chunk()
            while play.read():
                play.answer()
        play.read_next()
        count += 1
    assert count < 10
    play.settle()
    assert play.present
    assert play.present.heard == list(range(play.moves.queue.unit_count))


def test_worker_that_answers_in_time_keeps_the_session(play: Play) -> None:
    first = play.present
    play.chunk()
    play.read()
    play.session.overdue(play.now)
    move = play.move
    assert move.cause is MoveCause.OVERDUE
    play.claim()
    play.read_next()
    play.answer()
    assert play.outcomes[-1] is MoveOutcome.STAYED
    assert (play.is_moving, play.next) == (False, None)
    play.chunk()
    play.settle()
    assert play.present is first
    assert first
    assert first.heard == [0, 1, 2, 3, 4]


def test_late_answer_wins_even_after_the_last_past_unit_was_sent(play: Play) -> None:
    play.chunk()
    play.read()
    play.session.overdue(play.now)
    play.claim()
    play.read_next()
    last = play.take_next()
    assert last
    assert last.rebuild.is_last
    play.answer()
    assert play.outcomes[-1] is MoveOutcome.STAYED
    assert play.kinds() == ["result"] * 4


def test_next_worker_that_is_ready_first_gets_the_overdue_unit(play: Play) -> None:
    first = play.present
    play.chunk()
    play.read()
    play.session.overdue(play.now)
    play.claim()
    play.settle()
    assert play.present is not first
    assert play.present
    assert play.present.heard == [0, 1, 2, 3]
    assert play.kinds() == ["result"] * 4


def test_session_leaves_slow_workers_once_in_ten_seconds(play: Play) -> None:
    play.chunk()
    play.read()
    play.session.overdue(play.now)
    play.claim()
    play.pump()
    play.wait(9.9)
    play.session.overdue(play.now)
    assert not play.is_moving
    play.wait(0.2)
    play.session.overdue(play.now)
    assert play.move.cause is MoveCause.OVERDUE


def test_preparation_is_not_in_vain_if_a_draining_worker_is_slow(play: Play) -> None:
    play.drain()
    move = play.move
    play.claim()
    play.chunk()
    play.read()
    play.pump()
    play.session.overdue(play.now)
    assert not play.read_next()
    play.answer()
    assert play.move is move
    play.settle()
    assert play.outcomes[-1] is MoveOutcome.MOVED


def test_pause_between_preparations_doubles(play: Play) -> None:
    for pause_s in (5.0, 10.0, 20.0):
        play.chunk()
        play.read()
        play.session.overdue(play.now)
        assert play.is_moving
        play.answer()
        play.wait(pause_s)
        play.session.overdue(play.now)
        assert not play.is_moving
        play.wait(pause_s)


def test_draining_worker_whose_device_is_stuck_is_left_in_the_middle_of_a_unit(play: Play) -> None:
    first = play.present
    play.drain()
    play.claim()
    play.chunk()
    play.read()
    play.pump()
    assert play.present is first
    leaving = session_pb2.Leaving(reason=session_pb2.LEAVING_REASON_STUCK_DEVICE)
    play.respond(session_pb2.ConverseResponse(leaving=leaving))
    play.settle()
    assert play.present is not first
    assert play.kinds() == ["result"] * 4


def test_attempt_goes_on_when_the_worker_is_lost_meanwhile(play: Play) -> None:
    play.drain()
    move = play.move
    play.claim()
    play.read_next()
    play.chunk()
    play.read()
    play.wait(5.0)
    play.present = None
    play.tell(play.session.failed(LOST, play.now))
    assert play.move is move
    assert (move.cause, move.silent_since) == (MoveCause.WORKER_LOST, play.now)
    play.settle()
    assert play.present
    assert play.present.heard == [0, 1, 2, 3]
    play.wait(LIMITS.failover_s)
    assert play.session.closed is None


def test_session_without_a_next_worker_stays_until_its_worker_ends(play: Play) -> None:
    play.drain()
    for _ in range(100):
        play.wait(5.0)
        play.chunk()
        play.settle()
    assert play.kinds() == ["result"] * 103
    closed = session_pb2.Closed(reason=session_pb2.CLOSE_REASON_SHUTDOWN)
    play.respond(session_pb2.ConverseResponse(closed=closed))
    assert play.move.cause is MoveCause.SHUTDOWN
    play.wait(LIMITS.failover_s)
    assert play.session.closed
    assert play.session.closed.reason is CloseReason.FAILED


@pytest.mark.parametrize("read_count", [0, 1, 2])
def test_session_stays_when_the_drain_is_taken_back(play: Play, read_count: int) -> None:
    first = play.present
    play.drain()
    play.claim()
    play.chunk()
    play.read()
    for _ in range(read_count):
        play.read_next()
    play.undrain()
    assert play.outcomes == [MoveOutcome.STAYED]
    assert (play.is_moving, play.next) == (False, None)
    play.chunk()
    play.settle()
    assert play.present is first
    assert first
    assert first.heard == [0, 1, 2, 3, 4]
    play.drain()
    play.claim()
    play.settle()
    assert play.present is not first
    assert play.kinds() == ["result"] * 5


def test_session_whose_worker_is_stuck_leaves_it_although_a_drain_is_taken_back(play: Play) -> None:
    first = play.present
    play.drain()
    leaving = session_pb2.Leaving(reason=session_pb2.LEAVING_REASON_STUCK_DEVICE)
    play.respond(session_pb2.ConverseResponse(leaving=leaving))
    play.undrain()
    assert play.move.cause is MoveCause.OVERDUE
    play.claim()
    play.settle()
    assert play.present is not first


def test_drain_that_is_taken_back_before_the_conversation_is_open_moves_nothing() -> None:
    play = Play()
    play.tell(play.session.granted(60.0, play.now))
    play.drain()
    play.undrain()
    play.say('{"type":"prepare"}')
    play.pump()
    assert play.moves.phase is MovePhase.SETTLED


def test_worker_that_drains_before_it_has_opened_is_left_afterwards() -> None:
    play = Play()
    play.tell(play.session.granted(60.0, play.now))
    play.drain()
    assert not play.is_moving
    play.say('{"type":"prepare"}')
    play.pump()
    first = play.present
    play.claim()
    play.chunk()
    play.settle()
    assert play.present is not first
    assert play.present
    assert play.present.heard == [0]


def test_stuck_device_is_left_even_without_a_unit(play: Play) -> None:
    first = play.present
    leaving = session_pb2.Leaving(reason=session_pb2.LEAVING_REASON_STUCK_DEVICE)
    play.respond(session_pb2.ConverseResponse(leaving=leaving))
    play.claim()
    play.pump()
    assert play.present is not first


def test_session_whose_journal_is_given_up_meanwhile_stays() -> None:
    play = Play(limits=replace(LIMITS, journal_bytes=70_000))
    play.begin()
    for _ in range(2):
        play.chunk()
        play.settle()
    play.chunk()
    play.read()
    play.drain()
    play.claim()
    play.pump()
    play.answer()
    assert play.moves.phase is MovePhase.FIXED
    play.chunk()
    play.settle()
    assert play.kinds() == ["result"] * 4


def test_pause_holds_at_the_next_worker_after_a_drain(play: Play) -> None:
    play.say('{"type":"pause"}')
    play.settle()
    play.drain()
    play.claim()
    play.settle()
    assert play.present
    assert play.present.is_paused


def test_client_that_leaves_ends_the_preparation(play: Play) -> None:
    play.drain()
    play.claim()
    play.pump(2)
    play.say('{"type":"stop"}')
    assert not play.is_moving
    assert play.outcomes[-1] is MoveOutcome.FAILED
    assert play.space.used_bytes == 0


def test_few_sessions_rebuild_at_once_in_the_order_in_which_they_ask() -> None:
    permits, begun = RebuildPermits(2), list[int]()
    slots = [Slot() for _ in range(5)]
    for number, slot in enumerate(slots):
        permits.request(slot, lambda number=number: begun.append(number))
    assert begun == [0, 1]
    permits.give_back(slots[2])  # without a permit
    permits.give_back(slots[0])
    assert begun == [0, 1, 3]
    permits.give_back(slots[0])
    assert begun == [0, 1, 3]
    permits.give_back(slots[1])
    assert begun == [0, 1, 3, 4]
    assert permits.free_count == 0


def test_move_waits_for_its_permit_unless_the_worker_is_lost(play: Play) -> None:
    play.drain()
    play.permits.free_count = 0
    play.claim()
    assert not play.read_next()
    play.present = None
    play.tell(play.session.failed(LOST, Moment(play.now.monotonic_s, 0)))
    assert play.read_next()


def test_session_moves_ever_more_rarely_while_all_workers_are_slow(play: Play) -> None:
    moved_s = list[float]()
    for _ in range(400):
        play.chunk()
        play.read()
        play.wait(3.0)
        play.session.overdue(play.now)
        if play.is_moving:
            play.claim()
            moved_s.append(play.now.monotonic_s)
        play.settle()
    assert 5 <= len(moved_s) <= 8, "in 20 minutes"
    for _ in range(300):
        play.wait(10.0)
        play.chunk()
        play.settle()
    for _ in range(2):
        play.chunk()
        play.read()
        play.session.overdue(play.now)
        assert play.is_moving
        play.claim()
        play.settle()
        play.wait(10.0)
