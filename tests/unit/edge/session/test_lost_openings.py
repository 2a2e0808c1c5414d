"""A conversation whose first worker is lost before it has opened the conversation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.edge.moved_play import LIMITS, LOST, SHORT, Play

from duplane.edge.close import CloseReason
from duplane.edge.routing import Route
from duplane.edge.session.continuity import NO_CONTINUITY
from duplane.edge.session.move_table import MoveOutcome, MovePhase
from duplane.fabric.v1 import lease_pb2, session_pb2

PREPARE = '{"type":"prepare"}'
Ends = Callable[[Play], None]


@pytest.fixture
def play() -> Play:
    """Return a client of dialect C whose first worker has the settings, and does not answer."""
    new = Play()
    new.tell(new.session.granted(60.0, new.now))
    new.say(PREPARE)
    assert new.session.take(new.now)
    return new


def revoke(play: Play) -> None:
    """Let the worker close the session because its lease is void."""
    _close(play, session_pb2.CLOSE_REASON_REVOKED)


def shut_down(play: Play) -> None:
    """Let the worker close the session because it shuts down."""
    _close(play, session_pb2.CLOSE_REASON_SHUTDOWN)


def _close(play: Play, reason: session_pb2.CloseReason) -> None:
    play.respond(session_pb2.ConverseResponse(closed=session_pb2.Closed(reason=reason)))
    play.present = None


@pytest.mark.parametrize("lose", [Play.lose, revoke])
def test_another_worker_opens_the_conversation(play: Play, lose: Ends) -> None:
    play.chunk()
    lose(play)
    assert play.session.closed is None
    play.claim()
    play.settle()
    assert play.present
    assert play.present.heard == [0]
    assert play.present.requests == ["open", "unit"]
    assert play.kinds() == ["queue_done", "prepared", "result"]
    assert play.outcomes == [MoveOutcome.MOVED]


def test_conversation_can_move_after_its_second_worker_has_opened_it(play: Play) -> None:
    play.lose()
    play.claim()
    play.chunk()
    play.settle()
    play.lose()
    play.claim()
    play.chunk()
    play.settle()
    assert play.present
    assert play.present.requests == ["open", "rebuild", "unit"]
    assert play.kinds() == ["queue_done", "prepared", "result", "result"]


def test_worker_may_be_lost_before_there_are_settings() -> None:
    play = Play()
    play.tell(play.session.granted(60.0, play.now))
    play.lose()
    play.say(PREPARE)
    play.claim()
    play.pump()
    assert play.kinds() == ["queue_done", "prepared"]


def test_settings_may_come_after_the_second_claim() -> None:
    play = Play()
    play.tell(play.session.granted(60.0, play.now))
    play.lose()
    play.claim()
    play.wait(LIMITS.failover_s + 1)
    play.say(PREPARE)
    play.pump()
    assert play.kinds() == ["queue_done", "prepared"]


def test_queue_positions_are_not_told_again(play: Play) -> None:
    play.lose()
    play.tell(play.session.queued(lease_pb2.Queued(ticket_id="t", position=2), play.now))
    assert play.kinds() == ["queue_done"]


def test_session_ends_when_no_worker_is_found_in_time(play: Play) -> None:
    play.lose()
    play.wait(LIMITS.failover_s - 0.5)
    assert play.session.closed is None
    play.wait(0.5)
    assert play.session.closed
    assert play.session.closed.reason is CloseReason.FAILED
    assert play.outcomes == [MoveOutcome.FAILED]


def test_worker_that_only_claims_is_tried_again_until_the_time_is_over() -> None:
    """Settings that no worker has had cannot be the cause of a loss."""
    play = Play()
    play.tell(play.session.granted(60.0, play.now))
    for _ in range(3):
        play.lose()
        play.claim()
    play.say(PREPARE)
    play.pump()
    assert play.kinds() == ["queue_done", "prepared"]


def test_settings_that_two_workers_lost_end_the_session(play: Play) -> None:
    play.lose()
    play.claim()
    assert play.session.take(play.now)
    play.lose()
    assert play.session.closed
    assert play.session.closed.reason is CloseReason.FAILED


@pytest.mark.parametrize("ends", [(shut_down, Play.lose), (Play.lose, shut_down)])
def test_settings_are_not_blamed_for_a_shutdown(play: Play, ends: tuple[Ends, Ends]) -> None:
    for end in ends:
        end(play)
        play.claim()
        assert play.session.take(play.now)
    assert play.session.closed is None
    play.lose()
    assert play.session.closed


def test_silent_worker_is_left_only_by_the_time_limit(play: Play) -> None:
    play.wait(LIMITS.open_s)
    assert play.session.closed
    assert play.session.closed.reason is CloseReason.FAILED


def test_watch_finds_a_worker_that_does_not_open(play: Play) -> None:
    play.wait(2.0)
    assert list(play.moves.overdue_slots(1.0, play.now)) == [play.moves.present]
    play.session.overdue(play.now)
    assert play.moves.phase is MovePhase.OPENING, "only a worker that hangs is left"


def test_watch_finds_a_draining_worker_that_does_not_open(play: Play) -> None:
    play.drain()
    play.wait(2.0)
    assert list(play.moves.overdue_slots(1.0, play.now)) == [play.moves.present]
    play.respond(session_pb2.ConverseResponse(opened=session_pb2.Opened(model_digest="m")))
    play.wait(2.0)
    assert not play.moves.overdue_slots(1.0, play.now)


def test_session_without_continuity_ends() -> None:
    play = Play(continuity=NO_CONTINUITY)
    play.tell(play.session.granted(60.0, play.now))
    play.say(PREPARE)
    assert play.session.take(play.now)
    play.tell(play.session.failed(LOST, play.now))
    assert play.session.closed


def test_client_of_dialect_a_is_told_that_no_worker_was_found() -> None:
    play = Play(Route.REALTIME)
    play.tell(play.session.granted(60.0, play.now))
    play.say('{"type":"session.update","session":{"instructions":"x"}}')
    assert play.session.take(play.now)
    play.lose()
    play.wait(LIMITS.failover_s)
    assert play.session.closed
    assert play.session.closed.reason is CloseReason.WORKER_CONNECT_FAILED


def test_units_that_wait_are_cut_for_the_model_of_the_worker_that_opens(play: Play) -> None:
    """The second worker has another model, and the third one the same as the second."""
    play.say(SHORT)
    play.lose()
    play.claim(unit_s=0.5)
    play.chunk()
    play.lose()
    play.claim(unit_s=0.5)
    play.settle()
    assert play.present
    assert play.present.heard == [0, 1]
    assert play.moves.queue.unit_count == 2
    assert play.moves.queue.held.rest_bytes == 4 * 100


def test_as_few_units_wait_as_before_the_loss(play: Play) -> None:
    """All of them are late for the model: the conversation is not open yet."""
    play.lose()
    for _ in range(LIMITS.early_unit_count + 3):
        play.chunk()
    assert play.moves.queue.held.unit_count == LIMITS.early_unit_count
    play.claim()
    play.settle()
    assert play.present
    assert len(play.present.heard) == LIMITS.early_unit_count


def test_dropped_units_are_counted_once_although_two_workers_were_claimed(play: Play) -> None:
    play.lose()
    play.claim(unit_s=0.5)
    for _ in range(LIMITS.early_unit_count + 3):
        play.chunk()
    play.lose()
    play.claim(unit_s=0.5)
    assert play.moves.queue.take_dropped(0).unit_count == 6
