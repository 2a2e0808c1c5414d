"""A conversation that moves from worker to worker, without sockets and without a clock.

`Play` is a client with its session, and one worker at a time. Like a real worker, each worker knows
only the messages that it received. So its context shows whether it has the whole conversation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.transcripts import json_of

from duplane.edge.clock import Moment
from duplane.edge.close import CloseReason
from duplane.edge.identity import Identity
from duplane.edge.routing import ENDPOINTS, Route
from duplane.edge.session.duplex_session import DuplexSession
from duplane.edge.session.journal import Journal, JournalSpace
from duplane.edge.session.moving import MoveCause, Moves, cause_of
from duplane.edge.settings import Limits
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.v1 import lease_pb2, session_pb2

LIMITS = Limits(pending_unit_count=64)
LOST = FabricError(Reason.UNAVAILABLE, "Socket closed", is_foreign=True)
CHUNK = '{"type":"audio_chunk","audio_base64":"@pcm:16000"}'
SHORT = '{"type":"audio_chunk","audio_base64":"@pcm:100"}'
APPEND = '{"type":"input_audio_buffer.append","audio":"@pcm:16000"}'
PROMPT, PER_UNIT = 7, 12


class Worker:
    """A worker's side of one call. It accepts units only in order, and drops none."""

    def __init__(self, digest: str = "m") -> None:
        self.digest = digest
        self.heard: list[int] = []  # sequences of the units in the context
        self.inbox: deque[session_pb2.Unit] = deque()
        self.requests: list[str] = []
        self.most_waiting = 0
        self.seed: int | None = None
        self.is_paused = False

    def receive(self, request: session_pb2.ConverseRequest) -> list[session_pb2.ConverseResponse]:
        kind = request.WhichOneof("message") or ""
        self.requests.append(kind)
        match kind:
            case "open":
                self.seed = request.open.seed
                opened = session_pb2.Opened(prompt_token_count=PROMPT, model_digest=self.digest)
                return [session_pb2.ConverseResponse(opened=opened)]
            case "rebuild":
                for past in request.rebuild.units:
                    self.hear(past.sequence)
                    assert past.context_token_count == self.context
                rebuilt = session_pb2.Rebuilt(sequence=self.heard[-1])
                return [session_pb2.ConverseResponse(rebuilt=rebuilt)]
            case "unit":
                self.inbox.append(request.unit)
                self.most_waiting = max(self.most_waiting, len(self.inbox))
            case "pause" | "resume":
                self.is_paused = kind == "pause"
            case _:
                raise AssertionError(kind)
        return []

    def hear(self, sequence: int) -> None:
        assert sequence > (self.heard[-1] if self.heard else -1)
        self.heard.append(sequence)

    @property
    def context(self) -> int:
        return PROMPT + PER_UNIT * len(self.heard)

    def answer(self, *, fails: bool = False) -> session_pb2.ConverseResponse | None:
        """Answer the oldest unit."""
        if not self.inbox:
            return None
        unit = self.inbox.popleft()
        if fails:
            failed = session_pb2.Failed(sequence=unit.sequence, reason="X", message="x")
            return session_pb2.ConverseResponse(failed=failed)
        self.hear(unit.sequence)
        return session_pb2.ConverseResponse(
            delta=session_pb2.Delta(
                sequence=unit.sequence,
                listen=session_pb2.Listen(),
                context_token_count=self.context,
                token_ids=[1],
                state_change=session_pb2.StateChange(),
            )
        )


class Play:
    """A client, its session and its workers."""

    def __init__(self, route: Route = Route.DUPLEX, limits: Limits = LIMITS) -> None:
        self.now = Moment(1000.0, 1_714_200_000_000_000_000)
        session = ENDPOINTS[route, "audio"].new_session(Identity("s", "rt_0"), limits, self.now)
        assert isinstance(session, DuplexSession)
        self.session = session
        self.space = JournalSpace(limits.journal_bytes, limits.journal_total_bytes)
        session.moves = Moves(Journal(self.space), session.requests, seed=77)
        self.events: list[dict[str, Any]] = []
        self.worker: Worker | None = Worker()
        self.sent_count = 0

    def tell(self, events: list[bytes]) -> None:
        self.events += map(orjson.loads, events)

    def kinds(self) -> list[str]:
        return [event["type"] for event in self.events]

    def wait(self, seconds: float) -> None:
        self.now = Moment(self.now.monotonic_s + seconds, self.now.wall_ns + int(seconds * 1e9))
        self.tell(self.session.expire(self.now))

    def say(self, text: str) -> None:
        self.tell(self.session.receive(orjson.dumps(json_of(text)), self.now))

    def chunk(self) -> None:
        self.sent_count += 1
        self.say(CHUNK)

    def respond(self, *responses: session_pb2.ConverseResponse) -> None:
        for response in responses:
            self.tell(self.session.responded(response, self.now))

    def pump(self, count: int = 1000) -> None:
        """Let the worker read up to `count` messages, and respond to settings and past units."""
        for _ in range(count):
            request = self.session.requests.take() if self.worker else None
            if request is None or self.worker is None:
                return
            self.respond(*self.worker.receive(request))

    def answer(self, *, fails: bool = False) -> session_pb2.ConverseResponse | None:
        response = self.worker.answer(fails=fails) if self.worker else None
        if response is not None:
            self.respond(response)
        return response

    def lose(self, error: FabricError = LOST) -> None:
        self.worker = None
        self.tell(self.session.failed(error, self.now))

    def claim(self, digest: str = "m") -> None:
        """Claim a slot of another worker."""
        self.worker = Worker(digest)
        self.tell(self.session.granted(60.0, self.now))

    def settle(self) -> None:
        """Let the worker read and answer all messages."""
        self.pump()
        while self.answer() is not None:
            self.pump()

    def begin(self) -> None:
        self.tell(self.session.granted(60.0, self.now))
        self.say('{"type":"prepare"}')
        self.pump()
        self.events.clear()


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
    assert play.session.move
    assert play.session.move.cause is MoveCause.WORKER_LOST
    play.chunk()
    play.claim()
    play.settle()
    assert play.session.move is None
    assert play.worker
    assert play.worker.requests == ["open", "rebuild", "unit"]
    assert play.worker.heard == [0, 1, 2, 3]
    assert play.worker.seed == first.seed == 77
    assert play.kinds() == ["result"] * 4
    assert [event["kv_cache_length"] for event in play.events] == [19, 31, 43, 55]


def test_seed_of_the_client_is_kept() -> None:
    play = Play()
    play.tell(play.session.granted(60.0, play.now))
    play.say('{"type":"prepare","config":{"seed":5}}')
    play.pump()
    moves = play.session.moves
    assert moves
    assert play.worker
    assert moves.journal.opening
    assert moves.journal.opening.seed == play.worker.seed


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
    """A play whose acts run in random order. `late` are answers of workers that were lost."""

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
        """Let a late answer come while no worker has a unit: nothing tells answers apart."""
        if self.session.requests.oldest_sent is None:
            self.respond(*self.late[-1:])

    def move(self) -> None:
        """Lose the worker. It answers its units nevertheless, but too late."""
        left = self.worker
        assert left
        while (response := left.answer()) is not None:
            self.late.append(response)
        self.wait(30.0)
        self.lose()
        self.respond(*self.late)
        self.claim()


ACTS = (Storm.chunk, Storm.chunk, Storm.chunk, Storm.part_of_a_unit, Storm.pump, Storm.read_some)
ACTS += (Storm.read_some, Storm.answer, Storm.answer, Storm.answer, Storm.fail, Storm.pause)
ACTS += (Storm.move, Storm.repeat)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(ACTS), max_size=60))
def test_every_chunk_has_one_result_whatever_is_lost(acts: list[Callable[[Storm], object]]) -> None:
    storm = Storm()
    for act in acts:
        act(storm)
    storm.settle()
    assert storm.worker
    assert storm.session.closed is None
    results = [event for event in storm.events if event["type"] in ("result", "error")]
    assert len(results) == storm.sent_count
    heard, unit_count = storm.worker.heard, storm.session.requests.unit_count
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


def test_fourth_loss_within_a_minute_ends_the_session(play: Play) -> None:
    for _ in range(3):
        play.wait(15.0)
        play.lose()
        play.claim()
        play.settle()
    play.wait(15.0)
    play.lose()
    assert play.session.closed
    assert play.session.closed.reason is CloseReason.FAILED


def test_losses_that_are_far_apart_end_no_session(play: Play) -> None:
    for _ in range(10):
        play.wait(20.1)
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
    assert play.session.move
    assert play.session.move.cause is MoveCause.OTHER_MODEL
    play.claim()
    play.settle()
    assert play.session.move is None
    assert play.worker
    assert play.worker.heard == [0]


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


def test_session_whose_journal_is_too_large_ends_with_its_worker() -> None:
    play = Play(limits=Limits(journal_bytes=50_000))
    play.begin()
    for _ in range(2):
        play.chunk()
        play.settle()
    assert play.space.given_up_count == 1
    play.lose()
    assert play.session.closed
    assert play.session.closed.reason is CloseReason.FAILED


@pytest.mark.parametrize(
    ("reason", "cause", "end"),
    [
        (session_pb2.CLOSE_REASON_SHUTDOWN, MoveCause.SHUTDOWN, None),
        (session_pb2.CLOSE_REASON_ENGINE_FAILED, MoveCause.MODEL_FAILED, None),
        (session_pb2.CLOSE_REASON_UNSPECIFIED, MoveCause.WORKER_LOST, None),
        (session_pb2.CLOSE_REASON_CONTEXT_FULL, None, CloseReason.CONTEXT_FULL),
        (session_pb2.CLOSE_REASON_REVOKED, None, CloseReason.FAILED),
        (session_pb2.CLOSE_REASON_IDLE_TIMEOUT, None, CloseReason.TIMEOUT),
    ],
)
def test_close_of_the_worker_moves_the_session_or_ends_it(
    play: Play, reason: session_pb2.CloseReason, cause: MoveCause | None, end: CloseReason | None
) -> None:
    play.chunk()
    play.settle()
    play.respond(session_pb2.ConverseResponse(closed=session_pb2.Closed(reason=reason)))
    assert (play.session.move and play.session.move.cause) == cause
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


def test_session_that_is_not_open_yet_ends_with_its_worker() -> None:
    play = Play()
    play.tell(play.session.granted(60.0, play.now))
    play.say('{"type":"prepare"}')
    play.lose()
    assert play.session.closed


def test_client_that_leaves_during_a_move_ends_its_session(play: Play) -> None:
    play.chunk()
    play.settle()
    play.lose()
    play.say('{"type":"stop"}')
    assert play.kinds()[-1] == "stopped"
    assert play.session.requests.take() is None
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
    moves = play.session.moves
    assert moves
    assert not moves.journal.is_whole
    assert play.kinds() == ["result"], "the answer itself is not lost"


def test_outcome_of_a_unit_that_had_one_is_dropped_and_counted(play: Play) -> None:
    play.chunk()
    play.pump()
    response = play.answer()
    assert response
    play.respond(response)
    assert play.kinds() == ["result"]
    assert play.session.requests.late_count == 1
