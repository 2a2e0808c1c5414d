"""Runs one case through a pure session and checks the session after every line.

The run takes the place of the runner and the fabric: it takes the requests of the session and
advances the clock. It passes on a response of the scheduler or the worker only if a real one could
send this response then.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
from fuzz.cases import Case, Line
from fuzz.event_rules import CLOSINGS, IllegalError, check_event
from fuzz.held_bounds import UNIT_BYTES, check_held
from fuzz.messages import Message
from google.protobuf import json_format
from support.protocols.transcripts import Step, chat_response_of, error_of, message_of, response_of

from duplane.edge.client_errors import RESUME_CODES, ErrorCode
from duplane.edge.clock import Moment
from duplane.edge.close import (
    CLOSE_CODES,
    NOT_READ,
    REFUSALS,
    SESSION_OVER,
    Close,
    CloseReason,
)
from duplane.edge.dialects.dialect import Phase
from duplane.edge.dialects.openai_errors import (
    COMMIT_EMPTY,
    ERRORS,
    RESPONSE_ACTIVE,
    RESPONSE_NOT_ACTIVE,
    UNKNOWN_ITEM,
)
from duplane.edge.identity import Identity
from duplane.edge.routing import ENDPOINTS, max_message_bytes, parse_target
from duplane.edge.session.chat_session import ChatSession
from duplane.edge.session.continuity import Continuity, RebuildPermits
from duplane.edge.session.duplex_session import DuplexSession
from duplane.edge.session.move_table import LOST_PHASES
from duplane.edge.transport.closing import cut_reason
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.journal import JournalSpace
from duplane.fabric.v1 import lease_pb2, session_pb2

IDENTITY = Identity("sess_0123456789ab", "rt_1714200000000")
BEGIN = Moment(36_077.123, 1_714_200_000_000_000_000)
_AFTER_THE_END = 4  # number of lines that still run after the end of the session
_ANSWER_BYTES = 64 * 1024  # limit of the answers to one client message
_NAMED = re.compile(r"[\w.\[\]]+(: .| base64 decode failed$)")
# The edge sends no event before it closes for these reasons. Only D sends an event before
# UNREADABLE.
_WITHOUT_EVENT = NOT_READ | {CloseReason.UNREADABLE}
CLIENT_CODES = frozenset(
    code for code in set(ErrorCode) - RESUME_CODES if code.fault == "client_error"
)
OPENAI_CODES = frozenset(ERRORS[code][1] for code in CLIENT_CODES)
_OPENAI = ("E", "L")
# Errors of E for what a client could not know: they name no field.
CODES_OF_E = frozenset(
    code for _, code in (COMMIT_EMPTY, RESPONSE_ACTIVE, RESPONSE_NOT_ACTIVE, UNKNOWN_ITEM)
)


class SessionRun:
    """Runs one case. `run` raises an exception if the session breaks a rule."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.now = BEGIN
        entry = parse_target(case.path, {})
        journals = JournalSpace(2**20, 2**20) if case.can_move else None
        continuity = Continuity(journals, RebuildPermits(1), new_seed=lambda: 7)
        self.session = ENDPOINTS[entry.route, entry.mode].new_session(
            replace(IDENTITY, model=entry.model, url_id=entry.url_id),
            case.limits,
            self.now,
            continuity,
        )
        self.chat = self.session if isinstance(self.session, ChatSession) else None
        self.duplex = self.session if isinstance(self.session, DuplexSession) else None
        self.message_bytes = max_message_bytes(entry, case.limits)
        self.log: list[tuple[str, Any]] = []  # all steps and messages, in order
        self.over_at: int | None = None  # length of `log` when the session ended
        self.answers: Counter[str] = Counter()
        self.message_count = self.mutated_count = 0
        self._closings = 0
        # State of the fabric.
        self.unanswered: deque[int] = deque()
        self._next_sequence = 0
        self.is_opened = False
        self._was_open_sent = False
        self.taken_chunks = self.answered_chunks = 0  # in dialect C
        self.taken_turns = self.answered_turns = 0  # in chats
        self.tell(self.session.connected(self.now), was_over=False)

    @property
    def dialect(self) -> str:
        return (
            "B chat" if self.chat and self.chat.dialect.name == "B" else self.session.dialect.name
        )

    @property
    def is_lost(self) -> bool:
        """Whether the session has lost its worker and waits for another one."""
        return self.duplex is not None and self.duplex.moves.phase in LOST_PHASES

    @property
    def is_over(self) -> bool:
        return self.session.closed is not None

    def run(self) -> None:
        left = _AFTER_THE_END
        for line in self.case.lines:
            left -= self.is_over
            if left < 0:
                return
            self.step(line)
            self.take_requests(is_hoarding=self.case.is_hoarding)
            self._check_state()

    # --- one line ---

    def step(self, line: Line) -> None:
        match line.who:
            case "client":
                assert line.message
                self.client(line.message)
            case "scheduler":
                self._scheduler(line)
            case "worker":
                self._worker(line)
            case "clock":
                self.wait(float(line.rest))
            case "binary":
                self.end(CloseReason.UNREADABLE, line)
            case "leaves":
                self.end(CloseReason.GONE, line)
            case "drain":
                self.end(CloseReason.SHUTDOWN, line)
            case _:
                raise ValueError(f"no such line: {line.who}")

    def client(self, message: Message) -> list[Any]:
        session, was_over = self.session, self.is_over
        self.message_count += 1
        self.mutated_count += message.is_mutated and not was_over
        self.log.append(("client", message))
        frame = message.render()
        if len(frame) > self.message_bytes:  # the runner checks this bound
            return self.tell(session.end(Close(CloseReason.TOO_BIG), self.now), was_over)
        before = (session.dialect.phase, session.has_slot, session.time_limits.next_deadline)
        told = session.receive(frame, self.now)
        if self.chat and self.chat.successor:  # the sound of a client of E flows to the model
            self.session = self.duplex = self.chat.successor
            self.chat = None
        events = self.tell(told, was_over)
        if sum(map(len, told)) > _ANSWER_BYTES:
            raise IllegalError(f"{sum(map(len, told))} bytes are said to one message")
        if not was_over:
            self._check_answer(frame, events, before)
        return events

    def _is_too_much(self, frame: bytes) -> bool:
        """Return whether the edge may refuse a frame for its size alone, without parsing it."""
        limits = self.case.limits
        opening_count = frame.count(b"[") + frame.count(b"{")
        is_many = opening_count + frame.count(b",") > limits.json_value_count
        return is_many or opening_count > limits.json_depth

    def _check_answer(
        self, frame: bytes, events: list[Any], before: tuple[Phase, bool, float]
    ) -> None:
        try:
            event = orjson.loads(frame)
        except orjson.JSONDecodeError:
            has_ended = self.session.closed and self.session.closed.reason is CloseReason.UNREADABLE
            if not has_ended and not self._is_too_much(frame):
                raise IllegalError("what is no JSON was taken") from None
            return
        errors = [told for told in events if told["type"] == "error"]
        if errors and not self.is_over:
            if len(events) != 1:
                raise IllegalError(f"a message is refused and answered: {events}")
            session = self.session
            after = (session.dialect.phase, session.has_slot, session.time_limits.next_deadline)
            if after != before:
                raise IllegalError(f"what is refused had an effect: {before} to {after}")
            self._check_fault(errors[0]["error"])
        elif not errors and self.dialect != "D":
            self._check_transition(event["type"], before[0])

    def _check_transition(self, kind: str, before: Phase) -> None:
        """Check that an accepted event led to a legal phase."""
        dialect = self.session.dialect
        legal = {dialect.transitions.get((before, kind))}
        if before is Phase.START:  # `session.init` may be implied
            legal.add(dialect.transitions.get((Phase.OPENING, kind)))
        if self.chat and Phase.OPENING in legal:
            legal.add(Phase.ACTIVE)  # a chat skips OPENING
        if dialect.phase not in legal:
            raise IllegalError(f"{kind} led from {before} to {dialect.phase}")
        self.taken_chunks += kind == "audio_chunk"
        if self.chat:
            self.taken_turns += kind in ("input.append", "audio_chunk", "response.create")

    def _check_fault(self, fault: Any) -> None:
        """Check that an error blames the client, names the field and is short."""
        if isinstance(fault, str):
            if len(fault) > 1024:
                raise IllegalError(f"{len(fault)} characters of error")
            return
        if self.dialect == "E" and fault["code"] in CODES_OF_E:
            return
        if fault["code"] not in (OPENAI_CODES if self.dialect in _OPENAI else CLIENT_CODES):
            raise IllegalError(f"a client's message is answered by {fault['code']}")
        is_named = fault["code"] == "not_ready" or _NAMED.match(fault["message"])
        if not is_named or len(fault["message"]) > 1024:
            raise IllegalError(f"names no field, or too long: {fault['message'][:200]}")

    # --- the fabric, and time ---

    def _scheduler(self, line: Line) -> None:
        session = self.session
        is_waiting = self.chat.needs_slot if self.chat else not session.has_slot
        if not (is_waiting or self.is_over):
            return
        if line.what == "granted":
            self.grant()
            return
        self._fabric(line)
        if line.what == "queued":
            queued = message_of(line.rest, lease_pb2.Queued())
            self.tell(session.queued(queued, self.now), was_over=self._was_over)
        else:
            error = FabricError(Reason(line.rest), "scripted")
            self.tell(session.failed(error, self.now), was_over=self._was_over)

    def grant(self) -> None:
        self._fabric(Line("scheduler", "granted"))
        told = self.session.granted(2.0 if self.chat else 60.0, self.now)
        self.tell(told, was_over=self._was_over)

    def _fabric(self, line: Line) -> None:
        self._was_over = self.is_over
        self.log.append(("fabric", line))

    def _worker(self, line: Line) -> None:
        if line.what == "breaks":
            is_there = self.chat.is_running if self.chat else self.session.has_slot
            if is_there or self.is_over:
                self._fabric(line)
                error = error_of(Step(0, line.who, line.what, line.rest))
                self._count_answer_to_turn(
                    self.tell(self.session.failed(error, self.now), was_over=self._was_over)
                )
        elif self.chat:
            self._chat_worker(line, self.chat)
        else:
            self._duplex_worker(line)

    def _chat_worker(self, line: Line, chat: ChatSession) -> None:
        if line.what not in ("prefilled", "piece", "done"):
            return
        if chat.is_running or self.is_over:
            self._fabric(line)
            told = chat.responded(
                chat_response_of(Step(0, "worker", line.what, line.rest)), self.now
            )
            self._count_answer_to_turn(self.tell(told, was_over=self._was_over))

    def _count_answer_to_turn(self, events: list[Any]) -> None:
        kinds = [event["type"] for event in events]
        self.answered_turns += kinds.count("response.done") + kinds.count("error")

    def _duplex_worker(self, line: Line) -> None:
        if self.duplex is None or line.what not in ("opened", "delta", "failed", "closed"):
            return
        response = response_of(Step(0, "worker", line.what, line.rest))
        if not self.is_over and not self._can_say(response):
            return
        self._fabric(Line("worker", line.what, _json_of(response, line.what)))
        events = self.tell(self.duplex.responded(response, self.now), was_over=self._was_over)
        kinds = [event["type"] for event in events]
        if line.what == "opened" and not self._was_over:
            self.is_opened = True
            if events[:1] and kinds[0] not in ("session.created", "prepared", "session.started"):
                raise IllegalError(f"what is opened is answered by {kinds[0]}")
        if line.what in ("delta", "failed"):
            self.answered_chunks += kinds.count("error")
        if line.what == "delta" and not self._was_over and self.dialect not in "CE" and not events:
            raise IllegalError("nothing is said of a unit")

    def _can_say(self, response: session_pb2.ConverseResponse) -> bool:
        """Return whether a worker could send this message now.

        If the message answers a unit, it gets the sequence of the unit.
        """
        if self.is_lost:
            return False
        match response.WhichOneof("message"):
            case "opened":
                return self._was_open_sent and not self.is_opened
            case "closed":
                return self.session.has_slot
            case "delta" | "failed" as kind:
                if not (self.is_opened and self.unanswered):
                    return False
                outcome = response.delta if kind == "delta" else response.failed
                if response.delta.dropped_unit_count == 1 < len(self.unanswered):
                    self.unanswered.popleft()
                outcome.sequence = self.unanswered.popleft()
                return True
        return False

    def wait(self, seconds: float) -> None:
        self.now = Moment(self.now.monotonic_s + seconds, self.now.wall_ns + int(seconds * 1e9))
        self.log.append(("clock", seconds))
        for _ in range(50):
            if not self.session.time_limits.next_deadline <= self.now.monotonic_s:
                return
            was_over = self.is_over
            self.tell(self.session.expire(self.now), was_over)
        raise IllegalError(f"a deadline is always over: {self.session.time_limits.next_deadline}")

    def end(self, end: CloseReason, line: Line) -> None:
        self.log.append(("end", line))
        was_over = self.is_over
        self.tell(self.session.end(Close(end), self.now), was_over)

    def take_requests(self, *, is_hoarding: bool = False) -> None:
        """Take the session's requests to the worker, as the runner does, and check them."""
        if self.chat:
            turn = self.chat.next_turn(self.now)
            if turn is not None:
                if not turn.messages or self.is_over:
                    raise IllegalError("a turn of nothing")
                turn.SerializeToString()
                self.log.append(("turn", turn))
            return
        assert self.duplex
        while not (is_hoarding and self.is_opened) and (outgoing := self.duplex.take(self.now)):
            self.log.append(("request", outgoing.request))
            self._check_request(outgoing.request)

    def _check_request(self, request: session_pb2.ConverseRequest) -> None:
        request.SerializeToString()
        kind = request.WhichOneof("message")
        if self.is_over or not self.session.has_slot:
            raise IllegalError(f"{kind} to a worker that is not there")
        if (kind == "open") is self._was_open_sent:
            raise IllegalError(f"{kind} out of order")
        self._was_open_sent = True
        if kind != "unit":
            return
        unit = request.unit
        if not self.is_opened or unit.sequence != self._next_sequence:
            raise IllegalError(f"unit {unit.sequence} after {self._next_sequence - 1}")
        self._next_sequence += 1
        self.unanswered.append(unit.sequence)
        if len(unit.audio) not in (0, UNIT_BYTES) or not (unit.audio or unit.video_frames):
            raise IllegalError(f"a unit of {len(unit.audio)} bytes")
        if not np.isfinite(np.frombuffer(unit.audio, dtype="<f4")).all():
            raise IllegalError("a unit with samples that are no numbers")
        if len(unit.video_frames) > self.case.limits.frame_count:
            raise IllegalError(f"{len(unit.video_frames)} pictures in a unit")

    # --- messages to the client, and bounds ---

    def tell(self, told: list[bytes], was_over: bool) -> list[Any]:
        """Check the messages of the session to its client, and return them decoded."""
        if told and was_over:
            raise IllegalError(f"said after the end: {told[0][:200]}")
        events = [orjson.loads(event) for event in told]
        dialect = self.dialect
        for event in events:
            self.log.append(("server", event))
            if self._closings:
                raise IllegalError(f"said after the closing event: {event}")
            check_event(dialect, event)
            self._closings += event["type"] in CLOSINGS[dialect]
            self.answers[event["type"]] += 1
            self.answered_chunks += event["type"] == "result"
        if self.is_over and not was_over:
            self.over_at = len(self.log)
            self._check_end(events)
        return events

    def _check_end(self, events: list[Any]) -> None:
        closed = self.session.closed
        assert closed
        close_code = self.session.close_code
        expected = CLOSE_CODES[closed.reason]
        if self.dialect == "E" and closed == SESSION_OVER:
            expected = 1001
        if close_code != expected and (self.dialect, close_code) != ("D", 1000):
            raise IllegalError(f"{closed.reason} closes with {close_code}")
        if len(cut_reason(closed.text).encode()) > 123:
            raise IllegalError("a reason that no closing frame holds")
        last: dict[str, Any] = events[-1] if events else {"type": None, "error": None}
        is_silent = self.dialect == "E" and closed.reason is CloseReason.CLIENT
        if closed.reason in _WITHOUT_EVENT or is_silent:
            is_told = not events
            if self.dialect == "D" and closed.reason is CloseReason.UNREADABLE:
                is_told = last["type"] == "error"
        elif closed.reason in REFUSALS and self.dialect not in ("C", "D", "H"):
            code = REFUSALS[closed.reason]
            code = ERRORS[code][1] if self.dialect in _OPENAI else code
            is_told = last["type"] == "error" and last["error"]["code"] == code
        else:
            is_told = last["type"] in (*CLOSINGS[self.dialect], "error")
        if not is_told:
            raise IllegalError(f"{closed.reason} is told by {last}")
        is_asking = self.duplex and self.duplex.take(self.now)
        if is_asking or self.session.dialect.phase is not Phase.CLOSED:
            raise IllegalError("a session that is over goes on")
        if self.chat and (self.chat.needs_slot or self.chat.next_turn(self.now)):
            raise IllegalError("a chat that is over wants a slot")

    def _check_state(self) -> None:
        session = self.session
        if self.is_over:
            if session.time_limits.next_deadline != float("inf"):
                raise IllegalError("a session that is over waits")
            return
        is_paused = session.dialect.phase is Phase.PAUSED  # the worker bounds the pause
        if not is_paused and not session.time_limits.next_deadline < float("inf"):
            raise IllegalError("something is waited for without a bound")
        check_held(self.session, self.case.limits)
        if self.dialect == "C" and self.answered_chunks > self.taken_chunks:
            raise IllegalError(f"{self.answered_chunks} answers to {self.taken_chunks} chunks")
        if self.chat and self.answered_turns > self.taken_turns:
            raise IllegalError(f"{self.answered_turns} answers to {self.taken_turns} turns")


def _json_of(response: session_pb2.ConverseResponse, kind: str) -> str:
    part = getattr(response, kind)
    return json_format.MessageToJson(part, preserving_proto_field_name=True, indent=None)
