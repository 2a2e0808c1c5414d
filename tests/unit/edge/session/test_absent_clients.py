"""Clients that lose their sockets, at any time and for any time, on a virtual clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.edge.moved_play import LIMITS, Play

from duplane.edge.client_errors import ErrorCode
from duplane.edge.close import CloseReason
from duplane.edge.dialects.actions import Return
from duplane.edge.session.detachment import KEPT_BYTES, Detachment, Presence
from duplane.edge.session.effects import Acquire, Cancel, Effect, RecordResumed
from duplane.edge.session.move_table import MovePhase
from duplane.edge.session.unit_state import NO_EVENT, Cursor
from duplane.fabric.journal import JournalSpace

SAMPLES = 16_000
HOLD_S, RESUME_S = LIMITS.hold_s, LIMITS.resume_s


class Absent(Play):
    """A client of dialect C that can return, with what it has heard."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[dict[str, Any]] = []
        self.secret = ""
        self.acquired = 0
        self.resumed: list[RecordResumed] = []

    def begin(self) -> None:
        self.tell(self.session.granted(60.0, self.now))
        self.say('{"type":"prepare","resumable":true}')
        self.pump()
        self.secret = self.events[-1]["resume"]["token"].partition(".")[2]
        self.events.clear()

    @property
    def detachment(self) -> Detachment:
        assert self.session.detachment
        return self.session.detachment

    @property
    def is_away(self) -> bool:
        return self.session.is_detached

    def tell(self, events: list[bytes]) -> None:
        if not self.is_away:
            told = map(orjson.loads, events)
            self.heard += [event for event in told if "part" in event]
        super().tell(events)

    def _execute(self, effect: Effect) -> None:
        if isinstance(effect, Cancel) and effect.slot is self.moves.present:
            self.present = None
        if isinstance(effect, Acquire):
            assert not self.is_away, "a session without a client moves"
            self.acquired += 1
        if isinstance(effect, RecordResumed):
            self.resumed.append(effect)
        super()._execute(effect)

    def vanish(self, unheard_count: int = 0) -> None:
        """Lose the socket, and the last events that were written to it."""
        if not self.is_away and not self.session.closed:
            del self.heard[len(self.heard) - min(unheard_count, len(self.heard)) :]
            assert self.session.detach(self.now)
            self.tell([])

    def cursor(self) -> Cursor:
        return Cursor(self.heard[-1]["unit"], self.heard[-1]["part"]) if self.heard else NO_EVENT

    def asking(self, **changed: Any) -> Return:
        return replace(Return("s", self.secret, *self.cursor()), **changed)

    def come_back(self) -> None:
        """Return, unless this is refused because it happens too often."""
        if self.session.closed:
            return
        returned = self.asking()
        if refusal := self.session.refuses(returned, self.now):
            assert refusal[0] is ErrorCode.RESUME_REFUSED
            return
        resumed, *missed = self.session.resume(returned, self.now)
        answer = orjson.loads(resumed)
        assert answer["type"] == "resumed"
        assert answer["next_sample"] == SAMPLES * self.sent_count
        assert all(orjson.loads(event)["replayed"] for event in missed)
        self.tell([resumed, *missed])

    def step(self, name: str) -> None:
        """Do one step, if it is possible now."""
        if name == "chunk" and self.is_away:
            return
        steps: dict[str, Callable[[], object]] = {
            "chunk": self.chunk,
            "read": lambda: self.pump(1),
            "answer": self.answer,
            "vanish": self.vanish,
            "vanish and lose events": lambda: self.vanish(2),
            "come back": self.come_back,
            "wait": lambda: self.wait(2.0),
            "wait until it is parked": lambda: self.wait(HOLD_S + 1.0),
            "lose worker": lambda: self.lose() if self.present or self.next else None,
            "claim": self.claim_next,
            "drain": self.drain,
        }
        steps[name]()

    def claim_next(self) -> None:
        if self.is_moving and self.next is None:
            self.claim()

    def finish(self) -> None:
        """Let the client be there until everything is answered."""
        self.wait(0.0)
        while self.is_away and not self.session.closed:
            self.come_back()
            if self.is_away:
                self.wait(RESUME_S / 4)  # it returned too often
        for _ in range(100):
            self.claim_next()
            self.settle()


STEPS = (
    *("chunk", "chunk", "chunk", "read", "answer", "come back", "come back", "claim"),
    *("vanish", "vanish and lose events", "wait", "wait until it is parked", "lose worker"),
    "drain",
)


@settings(max_examples=200)
@given(steps=st.lists(st.sampled_from(STEPS), min_size=15, max_size=40))
def test_every_unit_is_heard_once_and_in_order(steps: list[str]) -> None:
    play = Absent()
    play.begin()
    for name in steps:
        if not play.session.closed:
            play.step(name)
    play.finish()
    places = [(event["unit"], event["part"]) for event in play.heard]
    assert places == sorted(set(places))
    samples = [event["next_sample"] for event in play.heard]
    assert samples == sorted(samples)
    if play.session.closed is None:
        assert len(play.heard) == play.sent_count
        assert play.detachment.presence is Presence.ATTACHED
        play.say('{"type":"stop"}')
    assert play.detachment.kept_bytes == 0
    assert not play.detachment.states
    assert play.space.used_bytes == 0
    assert play.permits.free_count == LIMITS.rebuild_count


@pytest.fixture
def talk() -> Absent:
    """Return a client with one answered unit."""
    play = Absent()
    play.begin()
    play.chunk()
    play.settle()
    return play


def test_session_is_held_and_then_parked_and_then_ends(talk: Absent) -> None:
    talk.vanish()
    talk.wait(HOLD_S - 0.1)
    assert talk.detachment.presence is Presence.HELD
    assert talk.present
    talk.wait(0.1)
    assert talk.detachment.presence is Presence.PARKED
    assert talk.present is None
    assert talk.moves.phase is MovePhase.PARKED
    assert talk.acquired == 0
    talk.wait(RESUME_S - HOLD_S)
    assert talk.session.closed
    assert talk.session.closed.reason is CloseReason.GONE
    assert talk.space.used_bytes == 0


def test_client_of_a_parked_session_goes_on_with_its_old_ticket(talk: Absent) -> None:
    talk.moves.present.granted.ticket_id = "q_1"
    talk.moves.present.granted.worker_id = "w0"
    talk.vanish()
    talk.wait(HOLD_S)
    talk.come_back()
    assert talk.acquired == 1
    assert talk.moves.attempt.tried_workers == {}  # also its former worker may serve it
    assert [one.outcome for one in talk.resumed] == ["rebuilt"]
    assert talk.resumed[0].gap_s == HOLD_S
    talk.claim()
    talk.chunk()
    talk.settle()
    assert [event["unit"] for event in talk.heard] == [0, 1]


def test_parked_sessions_pay_their_rebuilds_with_permits(talk: Absent) -> None:
    talk.permits.free_count = 0
    talk.vanish()
    talk.wait(HOLD_S)
    talk.come_back()
    talk.claim()
    talk.pump()
    assert talk.next
    assert talk.next.requests == []
    talk.permits.free_count = 1
    talk.permits.give_back(talk.moves.present)  # another session returns nothing
    talk.permits.request(talk.moves.attempt.slot, lambda: None)
    talk.moves.permitted(talk.moves.attempt.slot)
    talk.pump()
    assert talk.moves.phase is MovePhase.SETTLED


def test_session_whose_worker_is_lost_waits_for_its_client(talk: Absent) -> None:
    talk.chunk()
    talk.pump()
    talk.vanish()
    talk.lose()
    assert talk.detachment.presence is Presence.PARKED
    assert talk.acquired == 0
    talk.come_back()
    assert talk.acquired == 1
    talk.claim()
    talk.settle()
    assert [event["unit"] for event in talk.heard] == [0, 1]


def test_session_whose_worker_drains_leaves_it_when_its_client_is_back(talk: Absent) -> None:
    talk.vanish()
    talk.drain()
    assert talk.acquired == 0
    talk.come_back()
    assert talk.acquired == 1


@pytest.mark.parametrize(("has_journal", "wanted"), [(True, "keep"), (False, None)])
def test_copy_is_asked_for_only_if_an_edge_may_go_on_with_it(
    talk: Absent, *, has_journal: bool, wanted: str | None
) -> None:
    talk.moves.present.accepts_keep = True
    talk.moves.journal.is_whole = has_journal  # False: `--continuity off`, or it was given up
    outgoing = talk.session.take(talk.now)
    assert (outgoing.request.WhichOneof("message") if outgoing else None) == wanted


def test_client_that_returns_too_often_is_refused_for_a_minute(talk: Absent) -> None:
    for _ in range(10):
        talk.come_back()
    refusal = talk.session.refuses(talk.asking(), talk.now)
    assert refusal
    assert refusal[0] is ErrorCode.RESUME_REFUSED
    talk.wait(60.0)
    assert talk.session.refuses(talk.asking(), talk.now) is None


def test_client_that_has_more_than_the_session_is_refused(talk: Absent) -> None:
    refusal = talk.session.refuses(talk.asking(unit=1), talk.now)
    assert refusal
    assert refusal[0] is ErrorCode.RESUME_STALE


@pytest.mark.parametrize("secret", ["", "x", "wrong"])
def test_wrong_secret_changes_nothing(talk: Absent, secret: str) -> None:
    refusal = talk.session.refuses(talk.asking(secret=secret), talk.now)
    assert refusal
    assert refusal[0] is ErrorCode.RESUME_REFUSED
    assert talk.session.refuses(talk.asking(), talk.now) is None


def test_samples_that_the_client_has_lost_are_left_out(talk: Absent) -> None:
    talk.vanish()
    resumed = orjson.loads(talk.session.resume(talk.asking(from_sample=40_000), talk.now)[0])
    assert (resumed["next_sample"], resumed["lost_samples"]) == (40_000, 40_000 - SAMPLES)
    talk.chunk()
    talk.settle()
    assert talk.heard[-1]["next_sample"] == 40_000 + SAMPLES


def test_events_are_kept_within_their_bounds() -> None:
    detachment = Detachment(3, None)
    for unit in range(5):
        detachment.number([b'{"a":1}'] * 2, unit, 0)
    assert len(detachment.resume(NO_EVENT, 0.0, Play().now).events) == 6
    big = b'{"a":"' + bytes(KEPT_BYTES // 2) + b'"}'
    for unit in range(5, 8):
        detachment.number([big], unit, 0)
    assert detachment.kept_bytes <= KEPT_BYTES
    detachment.number([big, big, big], 8, 0)  # the newest unit is always kept
    assert detachment.cursor == Cursor(8, 2)
    detachment.end()
    assert detachment.kept_bytes == 0


def test_kept_events_count_in_the_bound_of_all_journals() -> None:
    space = JournalSpace(call_bytes=0, total_bytes=1000)
    space.used_bytes = 500  # journals
    detachment = Detachment(30, space)
    for unit in range(20):
        detachment.number([b'{"a":1}'], unit, 0)
        assert space.used_bytes == 500 + detachment.kept_bytes <= 1000
    assert detachment.kept_bytes > 400
    space.used_bytes += 1000
    detachment.number([b'{"a":1}'], 20, 0)
    (newest,) = detachment.resume(NO_EVENT, 0.0, Play().now).events
    assert orjson.loads(newest)["unit"] == 20
    detachment.end()
    assert space.used_bytes == 1500
