"""Conversations that continue at another worker, tested without sockets and without a clock."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.edge.moved_play import APPEND, LIMITS, SHORT, Play

from duplane.edge.routing import Route
from duplane.edge.session.move_table import MoveCause
from duplane.fabric.unit_audio import pcm_of
from duplane.fabric.v1 import lease_pb2, session_pb2


@pytest.fixture
def play() -> Play:
    """Return a client of dialect C whose conversation is open."""
    new = Play()
    new.begin()
    return new


def test_conversation_goes_on_at_another_worker(play: Play) -> None:
    for _ in range(3):
        play.chunk()
        play.settle()
    first = play.worker
    assert first
    play.lose()
    assert play.move.cause is MoveCause.WORKER_LOST
    play.chunk()
    play.claim()
    play.settle()
    assert not play.is_moving
    assert play.worker
    assert play.worker.requests == ["open", "rebuild", "unit"]
    assert play.worker.heard == [0, 1, 2, 3]
    assert play.worker.seed == first.seed == 77
    assert play.kinds() == ["result"] * 4
    assert [event["kv_cache_length"] for event in play.events] == [19, 31, 43, 55]


def test_each_worker_gets_loud_sound_in_a_form_that_it_reads(play: Play) -> None:
    loud = (np.linspace(-1.5, 1.5, 16_000).astype("<f4")).tobytes()
    audio = base64.b64encode(loud).decode()
    play.say(f'{{"type":"audio_chunk","audio_base64":"{audio}"}}')
    play.settle()
    heard: list[bytes] = []
    for is_former in (True, False, True):
        play.lose()
        play.claim(is_former=is_former)
        play.settle()
        assert play.worker
        (past,) = play.worker.past_units
        if is_former:
            assert (past.audio_int16, past.audio_exponent) == (b"", 0)
        heard.append(sound := pcm_of(past))
        assert np.abs(np.frombuffer(sound, "<f4") - np.frombuffer(loud, "<f4")).max() < 1e-4
    assert heard == [heard[0]] * 3


def test_rebuilt_model_hears_what_the_first_one_has_heard(play: Play) -> None:
    play.lose()
    play.claim()
    play.settle()
    sounds = [np.linspace(-peak, peak, 16_000).astype("<f4").tobytes() for peak in (0.7, 1.3)]
    for sound in sounds:
        audio = base64.b64encode(sound).decode()
        play.say(f'{{"type":"audio_chunk","audio_base64":"{audio}"}}')
        play.settle()
    first = play.worker
    assert first
    assert [heard == sent for heard, sent in zip(first.sounds, sounds, strict=True)] == [False] * 2
    play.lose()
    play.claim()
    play.settle()
    assert play.worker
    assert [pcm_of(past) for past in play.worker.past_units] == first.sounds


def test_unit_that_is_sent_again_has_a_form_that_the_next_worker_reads(play: Play) -> None:
    play.lose()
    play.claim()
    play.settle()
    play.chunk()
    play.pump()  # the worker has the unit, but does not answer it
    assert play.worker
    (sound,) = play.worker.sounds
    play.lose()
    play.claim(is_former=True)
    play.settle()
    assert play.worker.sounds == [sound]


def test_seed_of_the_client_is_kept() -> None:
    play = Play()
    play.tell(play.session.granted(60.0, play.now))
    play.say('{"type":"prepare","config":{"seed":5}}')
    play.pump()
    assert play.worker
    assert play.moves.journal.opening
    assert play.moves.journal.opening.seed == play.worker.seed


def test_unanswered_units_are_sent_again_in_their_order(play: Play) -> None:
    play.chunk()
    play.settle()
    for _ in range(4):
        play.chunk()
    play.pump()
    play.answer()
    assert play.worker
    assert [unit.sequence for unit in play.worker.inbox] == [2, 3, 4]
    play.lose()
    play.chunk()
    play.claim()
    play.settle()
    assert play.worker
    assert play.worker.heard == [0, 1, 2, 3, 4, 5]
    assert play.worker.most_waiting == 1, "units that waited come one by one"
    assert play.kinds() == ["result"] * 6
    for _ in range(2):
        play.chunk()
    play.pump()
    assert len(play.worker.inbox) == 2, "later units are sent at once again"


class Storm(Play):
    """A `Play` whose methods run in random order. `late` has the answers of lost workers."""

    def __init__(self) -> None:
        super().__init__(limits=replace(LIMITS, failover_s=1e4))
        self.begin()
        self.late: list[session_pb2.ConverseResponse] = []
        self.failed: set[int] = set()

    def part_of_a_unit(self) -> None:
        self.sent_count += 1
        self.say(SHORT)

    def read_some(self) -> None:
        self.pump(2)

    def fail(self) -> None:
        if response := self.answer(fails=True):
            self.failed.add(response.failed.sequence)

    def pause(self) -> None:
        self.say('{"type":"pause"}')
        self.say('{"type":"resume"}')

    def repeat(self) -> None:
        """Repeat a late answer while no worker has a unit. An answer does not name its worker."""
        if not self.moves.queue.sent:
            self.respond(*self.late[-1:])

    def lose_worker(self) -> None:
        """Lose the worker. Its answers to its last units arrive after the loss."""
        if left := self.present:
            while (response := left.answer()) is not None:
                self.late.append(response)
            self.wait(30.0)
            self.lose()
            self.respond(*self.late)
        self.claim_next()

    def drain_present(self) -> None:
        if self.present:
            self.drain()

    def undrain_present(self) -> None:
        if self.present:
            self.undrain()

    def wait_too_long(self) -> None:
        if self.present and self.present.inbox:
            self.wait(11.0)
            self.session.overdue(self.now)

    def be_stuck(self) -> None:
        leaving = session_pb2.Leaving(reason=session_pb2.LEAVING_REASON_STUCK_DEVICE)
        if self.present:
            self.respond(session_pb2.ConverseResponse(leaving=leaving))

    def claim_next(self) -> None:
        if self.is_moving and not self.next:
            self.claim()

    def claim_other_model(self) -> None:
        if self.is_moving and not self.next:
            self.claim("other")

    def leave_next(self) -> None:
        if self.next:
            self.wait(30.0)
            self.lose_next()

    def drain_next(self) -> None:
        if self.next:
            leaving = session_pb2.ConverseResponse(leaving=session_pb2.Leaving())
            self.respond_next(leaving)

    def settle_all(self) -> None:
        """Let all messages be answered, and all moves end."""
        self.settle()
        while self.is_moving:
            if self.next is None:
                self.claim()
            self.settle()


ACTS = (Storm.chunk, Storm.chunk, Storm.chunk, Storm.part_of_a_unit, Storm.pump, Storm.read_some)
ACTS += (Storm.read_some, Storm.answer, Storm.answer, Storm.answer, Storm.fail, Storm.pause)
ACTS += (Storm.lose_worker, Storm.repeat, Storm.drain_present, Storm.wait_too_long)
ACTS += (Storm.claim_next, Storm.be_stuck, Storm.undrain_present)
ACTS += (Storm.claim_next, Storm.claim_other_model, Storm.leave_next, Storm.drain_next, Storm.read)
ACTS += (Storm.read_next, Storm.read_next)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from(ACTS), max_size=60))
def test_every_chunk_has_one_result_whatever_is_lost(acts: list[Callable[[Storm], object]]) -> None:
    storm = Storm()
    for act in acts:
        act(storm)
    storm.settle_all()
    assert storm.worker
    assert storm.session.closed is None
    results = [event for event in storm.events if event["type"] in ("result", "error")]
    assert len(results) == storm.sent_count
    heard, unit_count = storm.worker.heard, storm.moves.queue.unit_count
    harmful_count = sum("two workers" in str(event) for event in storm.events)
    assert not storm.failed & set(heard)
    assert len(heard) + len(storm.failed) + harmful_count == unit_count
    assert storm.space.used_bytes > 0
    storm.say('{"type":"stop"}')
    assert storm.space.used_bytes == 0


def test_no_event_of_the_queue_comes_after_the_session_has_begun(play: Play) -> None:
    play.lose()
    play.tell(play.session.queued(lease_pb2.Queued(position=3, queue_length=4), play.now))
    play.claim()
    play.settle()
    assert play.events == []


def test_dialect_a_hears_nothing_of_a_move() -> None:
    play = Play(Route.REALTIME)
    play.tell(play.session.granted(60.0, play.now))
    play.say('{"type":"session.update","session":{"instructions":"Hi."}}')
    play.pump()
    for _ in range(2):
        play.say(APPEND)
        play.settle()
    play.lose()
    play.say(APPEND)
    play.claim()
    play.settle()
    kinds = play.kinds()
    assert kinds == ["session.queue_done", "session.created", *["response.listen"] * 3]


def test_pause_holds_at_the_next_worker(play: Play) -> None:
    play.chunk()
    play.settle()
    play.say('{"type":"pause"}')
    play.settle()
    play.lose()
    play.claim()
    play.settle()
    assert play.worker
    assert play.worker.is_paused
    assert play.worker.requests == ["open", "rebuild", "pause"]
    play.say('{"type":"resume"}')
    play.chunk()
    play.settle()
    assert not play.worker.is_paused
    assert play.worker.heard == [0, 1]


def test_unit_that_ends_two_workers_is_not_sent_to_a_third(play: Play) -> None:
    play.chunk()
    play.settle()
    for _ in range(2):
        play.chunk()
    for _ in range(2):
        play.pump()
        play.lose()
        play.claim()
    play.settle()
    assert play.worker
    assert play.worker.heard == [0, 2]
    assert play.kinds() == ["result", "error", "result"]
    assert "two workers were lost" in play.events[1]["error"]


def test_unit_is_not_blamed_for_a_worker_that_never_had_it(play: Play) -> None:
    play.chunk()
    play.settle()
    play.chunk()
    play.pump()
    play.lose()
    for _ in range(2):
        play.claim()
        play.pump(1)  # only `open`
        play.lose()
    play.claim()
    play.settle()
    assert play.worker
    assert play.worker.heard == [0, 1]
    assert play.kinds() == ["result"] * 2


def test_unit_stays_suspect_while_a_worker_is_lost_that_never_had_it(play: Play) -> None:
    play.chunk()
    play.settle()
    play.chunk()
    play.pump()
    play.lose()
    play.claim()
    play.pump(1)  # only `open`
    play.lose()
    play.claim()
    play.pump()
    play.lose()
    assert play.kinds() == ["result", "error"]
    assert "two workers were lost" in play.events[1]["error"]


def test_units_that_cannot_be_sent_again_count_as_dropped(play: Play) -> None:
    for _ in range(40):
        play.chunk()
    play.pump()
    play.lose()
    play.claim()
    play.settle()
    assert play.worker
    assert play.worker.heard == list(range(8, 40))
    assert sum(event.get("dropped_units", 0) for event in play.events) == 8
