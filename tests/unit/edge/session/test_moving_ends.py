"""Moves that fail, and lost workers after which a session ends instead of moving."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.edge.moved_play import LIMITS, Play

from duplane.edge.close import CloseReason
from duplane.edge.session.move_table import MoveCause, MovePhase, cause_of
from duplane.edge.settings import Limits
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.journal import JournalLoss, LossReason
from duplane.fabric.v1 import session_pb2


@pytest.fixture
def play() -> Play:
    """Return a client of dialect C whose conversation is open."""
    new = Play()
    new.begin()
    return new


def test_session_ends_when_no_worker_continues_it_in_time(play: Play) -> None:
    play.chunk()
    play.settle()
    play.lose()
    play.wait(LIMITS.failover_s - 0.5)
    assert play.session.closed is None
    play.claim()
    play.pump(1)
    play.lose()
    play.wait(0.5)
    assert play.session.closed
    assert play.session.closed.reason is CloseReason.FAILED
    assert play.session.closed.message == "the worker was lost"
    assert play.session.close_code == 1011
    assert play.space.used_bytes == 0


def test_time_to_move_ends_when_the_conversation_is_rebuilt(play: Play) -> None:
    play.lose()
    play.wait(LIMITS.failover_s - 1)
    play.claim()
    play.settle()
    play.wait(LIMITS.failover_s)
    assert play.session.closed is None


def test_fourth_loss_within_20_s_ends_the_session(play: Play) -> None:
    for _ in range(3):
        play.wait(6.0)
        play.lose()
        play.claim()
        play.settle()
    play.wait(6.0)
    play.lose()
    assert play.session.closed
    assert play.session.closed.reason is CloseReason.FAILED


def test_loss_every_ten_seconds_ends_no_session(play: Play) -> None:
    for _ in range(10):
        play.wait(10.0)
        play.lose()
        play.claim()
        play.settle()
        play.chunk()
        play.settle()
    assert play.session.closed is None
    assert play.kinds() == ["result"] * 10


def test_worker_with_another_model_is_left_for_the_next(play: Play) -> None:
    play.chunk()
    play.settle()
    play.lose()
    play.claim("other")
    play.pump()
    assert play.move.cause is MoveCause.OTHER_MODEL
    play.claim()
    play.settle()
    assert not play.is_moving
    assert play.worker
    assert play.worker.heard == [0]


def test_workers_with_another_model_are_no_losses(play: Play) -> None:
    play.chunk()
    play.settle()
    for _ in range(2):
        play.lose()
        for _ in range(4):
            play.claim("other")
            play.pump()
        play.claim()
        play.settle()
    assert play.session.closed is None
    play.lose()
    play.claim("other")
    play.pump()
    play.claim()
    play.settle()
    assert play.session.closed is None
    assert not play.can_move
    play.lose()
    assert play.session.closed


def test_worker_that_refuses_a_field_while_it_rebuilds_is_left_for_the_next(play: Play) -> None:
    play.chunk()
    play.settle()
    play.lose()
    play.claim()
    play.lose(FabricError(Reason.INVALID_FIELD, "x", field="units"))
    assert play.move.cause is MoveCause.OTHER_MODEL
    play.claim()
    play.settle()
    assert play.kinds() == ["result"]


@pytest.mark.parametrize("reason", [Reason.REBUILD_DIFFERS, Reason.REBUILD_REFUSED])
def test_conversation_that_cannot_be_rebuilt_ends(play: Play, reason: Reason) -> None:
    play.chunk()
    play.settle()
    play.lose()
    play.claim()
    play.lose(FabricError(reason, "x"))
    assert play.session.closed
    assert play.session.closed.reason is CloseReason.FAILED


@pytest.mark.parametrize("reason", [Reason.QUEUE_FULL, Reason.KIND_NOT_SERVED])
def test_session_ends_when_no_slot_can_be_had(play: Play, reason: Reason) -> None:
    play.lose()
    play.tell(play.session.failed(FabricError(reason, "x"), play.now))
    assert play.session.closed
    assert play.session.closed.reason is CloseReason.FAILED


@pytest.mark.parametrize(
    ("bound", "reason"),
    [
        ("journal_bytes", LossReason.SESSION_BOUND),
        ("journal_total_bytes", LossReason.TOTAL_BOUND),
    ],
)
def test_session_whose_journal_is_too_large_ends_with_its_worker(
    bound: str, reason: LossReason
) -> None:
    play = Play(limits=replace(Limits(), **{bound: 50_000}))
    play.begin()
    for number in range(3):
        play.chunk()
        play.pump()
        assert play.worker
        assert play.worker.inbox[-1].cannot_move is (number == 2)
        play.settle()
    assert play.losses == [JournalLoss(reason, play.losses[0].byte_count, 2)]
    assert play.losses[0].byte_count > 64_000
    assert play.space.given_up_count == 1
    assert not play.can_move
    assert play.moves.phase is MovePhase.FIXED
    play.lose()
    assert play.session.closed
    assert play.session.closed.reason is CloseReason.FAILED


@pytest.mark.parametrize(
    ("reason", "cause", "end"),
    [
        (session_pb2.CLOSE_REASON_SHUTDOWN, MoveCause.SHUTDOWN, None),
        (session_pb2.CLOSE_REASON_ENGINE_FAILED, MoveCause.MODEL_FAILED, None),
        (session_pb2.CLOSE_REASON_UNSPECIFIED, MoveCause.WORKER_LOST, None),
        (session_pb2.CLOSE_REASON_REVOKED, MoveCause.WORKER_LOST, None),
        (session_pb2.CLOSE_REASON_CONTEXT_FULL, None, CloseReason.CONTEXT_FULL),
        (session_pb2.CLOSE_REASON_IDLE_TIMEOUT, None, CloseReason.TIMEOUT),
    ],
)
def test_close_of_the_worker_moves_the_session_or_ends_it(
    play: Play, reason: session_pb2.CloseReason, cause: MoveCause | None, end: CloseReason | None
) -> None:
    play.chunk()
    play.settle()
    play.respond(session_pb2.ConverseResponse(closed=session_pb2.Closed(reason=reason)))
    assert (play.move.cause if play.is_moving else None) == cause
    assert (play.session.closed and play.session.closed.reason) == end


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (FabricError(Reason.UNAVAILABLE, "x"), MoveCause.WORKER_LOST),
        (FabricError(Reason.UNKNOWN, "x", is_foreign=True), MoveCause.WORKER_LOST),
        (FabricError(Reason.ENGINE_FAILED, "x"), MoveCause.MODEL_FAILED),
        (FabricError(Reason.DRAINING, "x"), MoveCause.SHUTDOWN),
        (FabricError(Reason.UNKNOWN, "x"), None),
        (FabricError(Reason.SLOW_CLIENT, "x"), None),
        (FabricError(Reason.OUT_OF_ORDER, "x"), None),
        (FabricError(Reason.INVALID_FIELD, "x"), None),
    ],
)
def test_failures_that_move_a_session(error: FabricError, cause: MoveCause | None) -> None:
    assert cause_of(error) == cause


def test_client_that_leaves_during_a_move_ends_its_session(play: Play) -> None:
    play.chunk()
    play.settle()
    play.lose()
    play.say('{"type":"stop"}')
    assert play.kinds()[-1] == "stopped"
    assert play.session.take(play.now) is None
    assert not play.is_moving
    assert play.space.used_bytes == 0


def test_edge_that_drains_lets_a_moving_session_go_on(play: Play) -> None:
    play.lose()
    assert play.session.drain(play.now) == []
    assert play.session.closed is None


def test_unit_lost_from_memory_makes_the_session_unmovable(play: Play) -> None:
    for _ in range(40):
        play.chunk()
    play.pump()
    play.answer()
    assert not play.can_move
    assert play.kinds() == ["result"], "the answer itself is not lost"


def test_outcome_of_a_unit_that_had_one_is_dropped(play: Play) -> None:
    play.chunk()
    play.pump()
    response = play.answer()
    assert response
    play.respond(response)
    assert play.kinds() == ["result"]
