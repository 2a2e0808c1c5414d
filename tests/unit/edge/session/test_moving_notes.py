"""What a client is told while its session has no worker."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.edge.moved_play import LIMITS, Play

from duplane.edge.routing import Route
from duplane.edge.session.move_table import MoveOutcome

INIT = '{"type":"session.init","payload":{}}'
LIMIT_S = 4.0
NOTE = {"type": "moving", "within_s": LIMIT_S}


@pytest.fixture
def play() -> Play:
    """Return a client of dialect C whose conversation is open."""
    new = Play(limits=replace(LIMITS, failover_s=LIMIT_S))
    new.begin()
    return new


def test_client_is_told_once_that_the_worker_is_lost(play: Play) -> None:
    play.chunk()
    play.pump()
    play.lose()
    play.claim()
    play.pump(1)
    play.lose()
    play.claim()
    play.settle()
    assert (play.kinds(), play.notes) == (["result"], [NOTE])
    play.lose()
    assert play.notes == [NOTE, NOTE]


def test_note_has_the_fields_of_every_event_of_dialect_b() -> None:
    play = Play(Route.REALTIME)
    play.tell(play.session.granted(60.0, play.now))
    play.say(INIT)
    play.pump()
    play.lose()
    assert play.notes == [
        {
            "type": "session.moving",
            "session_id": "s",
            "server_send_ts": play.now.wall_s,
            "within_s": LIMITS.failover_s,
        }
    ]


def test_client_of_dialect_a_is_told_nothing() -> None:
    play = Play(Route.REALTIME)
    play.tell(play.session.granted(60.0, play.now))
    play.say('{"type":"session.update","session":{"instructions":"x"}}')
    play.pump()
    count = len(play.events)
    play.lose()
    assert play.is_moving
    assert (len(play.events), play.notes) == (count, [])


def test_client_is_told_nothing_while_its_worker_answers(play: Play) -> None:
    play.drain()
    play.claim()
    play.settle()
    assert play.outcomes == [MoveOutcome.MOVED]
    assert play.notes == []


def test_client_that_waits_for_its_conversation_is_told_nothing() -> None:
    """Clients of older releases take an unknown event for a refusal until they are ready."""
    play = Play()
    play.tell(play.session.granted(60.0, play.now))
    play.say('{"type":"prepare"}')
    assert play.session.take(play.now)
    play.lose()
    assert play.is_moving
    assert (play.kinds(), play.notes) == (["queue_done"], [])


def test_session_that_cannot_move_only_ends() -> None:
    play = Play(limits=replace(LIMITS, journal_bytes=1000))
    play.begin()
    play.chunk()
    play.settle()
    play.lose()
    assert (play.kinds(), play.notes) == (["result", "error"], [])
