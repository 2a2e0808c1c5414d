"""A next worker that fails, drains or is late while a conversation prepares to move to it."""

from __future__ import annotations

import pytest
from google.protobuf.duration_pb2 import Duration
from support.edge.moved_play import LIMITS, LOST, PROMPT, Play

from duplane.edge.session.move_table import MoveCause, MoveOutcome
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.v1 import lease_pb2, model_pb2, session_pb2

MODEL = model_pb2.Model(name="m", context_token_limit=8192)
SHORT = model_pb2.Model(
    name="m", context_token_limit=8192, unit_duration=Duration(nanos=80_000_000)
)


def test_session_stays_while_the_next_worker_has_another_model(play: Play) -> None:
    first = play.present
    play.drain()
    play.claim("other")
    play.pump()
    assert (play.move.count, play.move.cause) == (2, MoveCause.DRAIN)
    play.chunk()
    play.settle()
    assert play.present is first
    play.claim()
    play.settle()
    assert play.present is not first


@pytest.mark.parametrize("is_lost", [False, True])
def test_worker_whose_model_is_described_differently_is_not_used(
    play: Play, *, is_lost: bool
) -> None:
    first = play.present
    play.moves.present.granted.model.CopyFrom(MODEL)
    if is_lost:
        play.lose()
    else:
        play.drain()
    granted = lease_pb2.Granted(worker_id="w9", model=SHORT)
    with pytest.raises(FabricError, match="another model") as refusal:
        play.moves.check_grant(play.move.slot, granted)
    play.lose_next(refusal.value)
    assert (play.move.count, "w9" in play.move.tried_workers) == (2, True)
    assert play.session.closed is None
    assert play.present is (None if is_lost else first)
    play.claim()
    play.chunk()
    play.settle()
    assert play.present
    assert play.present.heard == [0, 1, 2, 3]


@pytest.mark.parametrize("present", [None, MODEL])
def test_model_that_an_older_scheduler_does_not_name_is_compared_when_it_opens(
    play: Play, present: model_pb2.Model | None
) -> None:
    play.moves.present.granted.MergeFrom(lease_pb2.Granted(model=present))
    play.drain()
    next_model = None if present else MODEL
    granted = lease_pb2.Granted(worker_id="w9", model=next_model)
    play.moves.check_grant(play.move.slot, granted)
    play.session.claimed(play.move.slot, granted, 0.0, play.now)
    assert play.move.slot.granted == granted


def test_unit_that_waited_goes_to_the_former_worker_if_the_next_one_fails(play: Play) -> None:
    first = play.present
    play.drain()
    play.claim()
    play.read_next()
    play.read_next()
    assert play.take_next()
    play.chunk()
    assert not play.read()
    play.lose_next()
    play.settle()
    assert play.present is first
    assert play.kinds() == ["result"] * 4


def test_next_worker_that_drains_too_is_left_after_the_move(play: Play) -> None:
    play.drain()
    play.claim()
    leaving = session_pb2.Leaving(reason=session_pb2.LEAVING_REASON_DRAIN)
    play.respond_next(session_pb2.ConverseResponse(leaving=leaving))
    play.pump()
    second = play.present
    assert play.move.cause is MoveCause.DRAIN
    play.claim()
    play.chunk()
    play.settle()
    assert play.present is not second
    assert not play.is_moving
    assert play.present
    assert play.present.heard == [0, 1, 2, 3]


def test_next_worker_that_no_longer_drains_keeps_the_session(play: Play) -> None:
    play.drain()
    play.claim()
    assert play.take_next()
    leaving = session_pb2.Leaving(reason=session_pb2.LEAVING_REASON_DRAIN)
    play.respond_next(session_pb2.ConverseResponse(leaving=leaving))
    play.respond_next(session_pb2.ConverseResponse(staying=session_pb2.Staying()))
    assert play.take_next() is None, "the next worker still owes an answer to the settings"
    opened = session_pb2.Opened(prompt_token_count=PROMPT, model_digest="m")
    play.respond_next(session_pb2.ConverseResponse(opened=opened))
    assert play.next
    play.next.may_rebuild = True
    play.pump()
    assert play.outcomes == [MoveOutcome.MOVED]
    assert not play.is_moving


def test_slot_that_has_waited_too_long_for_its_permit_is_replaced(play: Play) -> None:
    play.drain()
    play.permits.free_count = 0
    play.claim()
    play.present = None
    play.tell(play.session.failed(LOST, play.now))
    play.lose_next(FabricError(Reason.OPEN_TIMEOUT, "no open came in time"))
    assert play.session.closed is None
    play.claim()
    play.settle()
    assert play.present
    assert play.present.heard == [0, 1, 2]


def close_queue(play: Play) -> None:
    """Send all past units to the next worker, which does not answer the last message."""
    play.drain()
    play.claim()
    play.read_next()
    play.read_next()
    assert play.take_next()
    assert play.is_last_sent


def test_units_that_waited_go_to_the_former_worker_one_at_a_time(play: Play) -> None:
    close_queue(play)
    for _ in range(6):
        play.chunk()
    play.lose_next()
    play.settle()
    assert play.present
    assert play.present.most_waiting == 1, "a worker drops units that come too fast"
    assert play.present.heard == list(range(9))


def test_session_leaves_a_next_worker_that_does_not_rebuild_in_time(play: Play) -> None:
    first = play.present
    close_queue(play)
    move = play.move
    play.chunk()
    play.wait(LIMITS.failover_s - 0.1)
    assert play.move is move
    play.wait(0.1)
    assert play.outcomes[-1] is MoveOutcome.FAILED
    assert play.move.count == 2
    play.next = None
    play.settle()
    assert play.present is first
    assert play.kinds() == ["result"] * 4
    play.wait(2 * LIMITS.failover_s)
    assert play.session.closed is None


def test_time_limit_of_an_attempt_that_has_failed_does_not_end_the_next_one(play: Play) -> None:
    close_queue(play)
    play.lose_next()
    move = play.move
    play.claim()
    play.wait(LIMITS.failover_s)
    assert play.move is move
    play.settle()
    assert play.outcomes[-1] is MoveOutcome.MOVED
    play.wait(LIMITS.failover_s)
    assert play.session.closed is None


def test_next_worker_whose_device_is_stuck_is_left(play: Play) -> None:
    first = play.present
    close_queue(play)
    play.chunk()
    leaving = session_pb2.Leaving(reason=session_pb2.LEAVING_REASON_STUCK_DEVICE)
    play.respond_next(session_pb2.ConverseResponse(leaving=leaving))
    assert play.move.count == 2
    play.next = None
    play.settle()
    assert play.present is first
    assert play.kinds() == ["result"] * 4
