"""A conversation that moves from worker to worker, without sockets and without a clock.

`Play` is a client with its session, and one worker at a time. Like a real worker, each worker has
only the messages that it received. So its context shows whether it has the whole conversation.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import orjson
from support.protocols.transcripts import json_of

from duplane.edge.clock import Moment
from duplane.edge.identity import Identity
from duplane.edge.routing import ENDPOINTS, Route
from duplane.edge.session.attempt import Attempt
from duplane.edge.session.continuity import Continuity, RebuildPermits
from duplane.edge.session.duplex_session import DuplexSession
from duplane.edge.session.effects import (
    Cancel,
    Effect,
    EndMove,
    RecordFixed,
    RequestPermit,
    ReturnPermit,
    Use,
)
from duplane.edge.session.move_table import MOVING, MoveCause, MoveOutcome, MovePhase
from duplane.edge.session.slot import Slot
from duplane.edge.settings import Limits
from duplane.fabric.durations import to_duration
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.journal import JournalLoss, JournalSpace
from duplane.fabric.unit_audio import pcm_of
from duplane.fabric.v1 import lease_pb2, session_pb2

LIMITS = Limits(pending_unit_count=64)
LOST = FabricError(Reason.UNAVAILABLE, "Socket closed", is_foreign=True)
CHUNK = '{"type":"audio_chunk","audio_base64":"@pcm:16000"}'
SHORT = '{"type":"audio_chunk","audio_base64":"@pcm:100"}'
APPEND = '{"type":"input_audio_buffer.append","audio":"@pcm:16000"}'
PROMPT, PER_UNIT = 7, 12
_NOTES = ("moving", "session.moving")


class Worker:
    """A worker's side of one call. It accepts units only in order, and drops none."""

    def __init__(self, digest: str = "m", *, is_former: bool = False) -> None:
        self.digest = digest
        self.is_former = is_former  # of the former release
        self.past_units: list[session_pb2.PastUnit] = []
        self.heard: list[int] = []  # sequences of the units in the context
        self.inbox: deque[session_pb2.Unit] = deque()
        self.requests: list[str] = []
        self.most_waiting = 0
        self.seed: int | None = None
        self.may_rebuild = False
        self.is_paused = False
        self.sounds: list[bytes] = []  # of the units, as float32
        self.speech: list[tuple[int, list[str]]] = []  # requests, with the words that are left

    def receive(self, request: session_pb2.ConverseRequest) -> list[session_pb2.ConverseResponse]:
        kind = request.WhichOneof("message") or ""
        self.requests.append(kind)
        match kind:
            case "open":
                self.seed, self.may_rebuild = request.open.seed, True
                opened = session_pb2.Opened(
                    prompt_token_count=PROMPT,
                    model_digest=self.digest,
                    accepts_audio_exponent=not self.is_former,
                    accepts_audio_int16=not self.is_former,
                    accepts_row_count=not self.is_former,
                    accepts_speech_requests=not self.is_former,
                )
                return [session_pb2.ConverseResponse(opened=opened)]
            case "rebuild":
                assert self.may_rebuild
                self.may_rebuild = not request.rebuild.is_last
                for past in request.rebuild.units:
                    self.hear(past.sequence)
                    self.past_units.append(past)
                    self.speech = orjson.loads(past.rebuild_state or b"[]")
                    assert past.context_token_count == self.context
                rebuilt = session_pb2.Rebuilt()
                return [session_pb2.ConverseResponse(rebuilt=rebuilt)]
            case "unit":
                assert not (request.unit.audio_int16 and self.is_former)
                self.inbox.append(request.unit)
                self.sounds.append(pcm_of(request.unit))
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
        delta = session_pb2.Delta(
            sequence=unit.sequence,
            listen=session_pb2.Listen(),
            context_token_count=self.context,
            token_ids=[1],
            state_change=session_pb2.StateChange(),
        )
        self._speak(unit, delta)
        return session_pb2.ConverseResponse(delta=delta)

    def _speak(self, unit: session_pb2.Unit, delta: session_pb2.Delta) -> None:
        """Speak the next word that was requested, if there is one."""
        assert not (unit.speech_requests and self.is_former)
        if unit.force_listen:
            interrupted = session_pb2.SPEECH_OUTCOME_INTERRUPTED
            for number, _ in self.speech:
                delta.speech_results.add(number=number, outcome=interrupted)
            self.speech.clear()
        self.speech += [(each.number, each.text.split()) for each in unit.speech_requests]
        if self.speech and not unit.force_listen:
            number, words = self.speech[0]
            delta.speech.text, delta.speech_request = words.pop(0), number
            if not words:
                del self.speech[0]
                delta.end_of_turn = True
                delta.speech_results.add(number=number, outcome=session_pb2.SPEECH_OUTCOME_SPOKEN)
        if self.speech:
            delta.rebuild_state = orjson.dumps(self.speech)


class Play:
    """A client, its session and its workers."""

    def __init__(
        self,
        route: Route = Route.DUPLEX,
        limits: Limits = LIMITS,
        continuity: Continuity | None = None,
    ) -> None:
        self.now = Moment(36_077.123, 1_714_200_000_000_000_000)
        self.space = JournalSpace(limits.journal_bytes, limits.journal_total_bytes)
        self.permits = RebuildPermits(limits.rebuild_count)
        continuity = continuity or Continuity(self.space, self.permits, new_seed=lambda: 77)
        identity = Identity("s", "rt_0")
        session = ENDPOINTS[route, "audio"].new_session(identity, limits, self.now, continuity)
        assert isinstance(session, DuplexSession)
        self.session = session
        self.moves = session.moves
        self.events: list[dict[str, Any]] = []  # without the notes
        self.notes: list[dict[str, Any]] = []  # that the worker is lost
        self.outcomes: list[MoveOutcome] = []  # of the attempts to move, in order
        self.losses: list[JournalLoss] = []
        self.present: Worker | None = Worker()
        self.next: Worker | None = None
        self._next_slot: Slot | None = None
        self.sent_count = 0

    @property
    def is_moving(self) -> bool:
        return self.moves.phase in MOVING

    @property
    def move(self) -> Attempt:
        """The move in progress."""
        assert self.is_moving
        return self.moves.attempt

    @property
    def can_move(self) -> bool:
        return self.moves.can_leave(MoveCause.WORKER_LOST, self.now)

    @property
    def is_last_sent(self) -> bool:
        """Whether the next worker has the last past units, and no worker gets units."""
        return self.moves.phase is MovePhase.CHANGING

    def tell(self, events: list[bytes]) -> None:
        for event in map(orjson.loads, events):
            (self.notes if event["type"] in _NOTES else self.events).append(event)
        while self.session.effects:
            self._execute(self.session.effects.popleft())

    def _execute(self, effect: Effect) -> None:
        match effect:
            case Use():
                self.present = self.next or self.present
                self.next = None
            case Cancel(slot):
                if slot is self._next_slot:
                    self.next = None
            case RequestPermit(permits, slot):
                permits.request(slot, lambda: self.moves.permitted(slot))
            case ReturnPermit(permits, slot):
                permits.give_back(slot)
            case EndMove():
                self.outcomes.append(effect.outcome)
            case RecordFixed(loss):
                self.losses.append(loss)
            case _:
                pass

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

    def respond_next(self, response: session_pb2.ConverseResponse) -> None:
        """Let the next worker respond."""
        self.tell(self.session.responded(response, self.now, self.move.slot))

    def respond(self, *responses: session_pb2.ConverseResponse) -> None:
        for response in responses:
            self.tell(self.session.responded(response, self.now))

    @property
    def worker(self) -> Worker | None:
        """The worker that gets the units. While no worker gets them, the next worker."""
        return self.present or self.next

    def pump(self, count: int = 1000) -> None:
        """Let the workers read up to `count` messages, and respond to settings and past units."""
        for _ in range(count):
            if not (self.read_next() or self.read()):
                return

    def read(self) -> bool:
        """Let the worker that gets the units read a message. Return False without a message."""
        outgoing = self.session.take(self.now) if self.present else None
        if outgoing is None or self.present is None:
            return False
        self.respond(*self.present.receive(outgoing.request))
        return True

    def read_next(self) -> bool:
        """Let the next worker read and answer a message. Return False without a message."""
        outgoing = self.take_next() if self.next else None
        if outgoing is None or self.next is None:
            return False
        for response in self.next.receive(outgoing):
            self.respond_next(response)
        return True

    def take_next(self) -> session_pb2.ConverseRequest | None:
        """Return the next message for the next worker, which does not get it."""
        outgoing = self.session.take(self.now, self.moves.attempt.slot)
        return outgoing and outgoing.request

    def answer(self, *, fails: bool = False) -> session_pb2.ConverseResponse | None:
        response = self.present.answer(fails=fails) if self.present else None
        if response is not None:
            self.respond(response)
        return response

    def lose(self, error: FabricError = LOST) -> None:
        """Lose the worker that gets the units. If no worker gets them, lose the next worker."""
        if self.present:
            self.present = None
            self.tell(self.session.failed(error, self.now))
        else:
            self.lose_next(error)

    def lose_next(self, error: FabricError = LOST) -> None:
        self.next = None
        self.tell(self.session.failed(error, self.now, self.move.slot))

    def claim(self, digest: str = "m", unit_s: float = 1.0, *, is_former: bool = False) -> None:
        """Claim a slot of another worker, which may rebuild as soon as there is a permit."""
        self.next = Worker(digest, is_former=is_former)
        self._next_slot = self.move.slot
        granted = lease_pb2.Granted(worker_id=f"w{self.move.number}")
        if unit_s != 1.0:
            granted.model.unit_duration.CopyFrom(to_duration(unit_s))
        self.moves.check_grant(self.move.slot, granted)
        self.tell(self.session.claimed(self.move.slot, granted, 0.0, self.now))

    def drain(self) -> None:
        """Let the worker that gets the units announce that it drains."""
        leaving = session_pb2.Leaving(reason=session_pb2.LEAVING_REASON_DRAIN)
        self.respond(session_pb2.ConverseResponse(leaving=leaving))

    def undrain(self) -> None:
        """Let the worker that gets the units announce that its drain was taken back."""
        self.respond(session_pb2.ConverseResponse(staying=session_pb2.Staying()))

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
