"""One case through the pure session, which is held to its word after every line.

The run stands for the shell and the fabric behind it: it lets the scheduler and the worker speak
only when they can, takes what the session has for the worker, and lets time pass.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from typing import Any

import numpy as np
import orjson
from edge_transcripts import Step, chat_response_of, error_of, message_of, response_of
from fuzz.cases import Case, Line
from fuzz.legal import CLOSINGS, IllegalError, check_event
from fuzz.messages import Message
from google.protobuf import json_format

from duplane.edge.chat_session import ChatSession
from duplane.edge.dialects.dialect import Identity, Moment, Phase
from duplane.edge.dialects.unwrap import unwrap
from duplane.edge.ends import CLOSE_CODES, REFUSALS, End, Ending
from duplane.edge.entry import close_reason, read_entry
from duplane.edge.faults import ErrorCode
from duplane.edge.gather import UNIT_BYTES
from duplane.edge.places import PLACES
from duplane.edge.session import Session
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.v1 import lease_pb2, session_pb2

IDENTITY = Identity("sess_0123456789ab", "rt_1714200000000")
BEGIN = Moment(1000.0, 1_714_200_000_000_000_000)
_AFTER_THE_END = 4  # lines that are tried on a session that is over
_ANSWER_BYTES = 64 * 1024  # to one message of a client; what it echoes is bounded
_NAMED = re.compile(r"[\w.\[\]]+(: .| base64 decode failed$)")
_UNTOLD = (End.GONE, End.UNREADABLE, End.TOO_BIG, End.TOO_SLOW)  # but, in D, the second
CLIENT_CODES = frozenset(code for code in ErrorCode if code.fault == "client_error")


class PureRun:
    """One case. `run` raises whatever is wrong."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.now = BEGIN
        entry = read_entry(case.path, {})
        self.session: Session = PLACES[entry.route, entry.mode].begin(
            IDENTITY, case.limits, self.now
        )
        self.chat = self.session if isinstance(self.session, ChatSession) else None
        limits = case.limits
        self.message_bytes = limits.chat_message_bytes if self.chat else limits.message_bytes
        self.log: list[tuple[str, Any]] = []  # what was done and said, in order
        self.over_at: int | None = None  # where in it the session was over
        self.answers: Counter[str] = Counter()
        self.message_count = self.mutated_count = 0
        self._closings = 0
        # The fabric's side.
        self.unanswered: deque[int] = deque()
        self._next_sequence = 0
        self.is_opened = False
        self._was_open_sent = False
        self.taken_chunks = self.answered_chunks = 0  # C
        self.taken_turns = self.answered_turns = 0  # chats

    @property
    def dialect(self) -> str:
        return (
            "B chat" if self.chat and self.chat.dialect.name == "B" else self.session.dialect.name
        )

    @property
    def is_over(self) -> bool:
        return self.session.farewell is not None

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
                self.end(End.UNREADABLE, line)
            case "leaves":
                self.end(End.GONE, line)
            case "drain":
                self.end(End.SHUTDOWN, line)
            case _:
                raise ValueError(f"no such line: {line.who}")

    def client(self, message: Message) -> list[Any]:
        session, was_over = self.session, self.is_over
        self.message_count += 1
        self.mutated_count += message.is_mutated and not was_over
        self.log.append(("client", message))
        frame = message.render()
        if len(frame) > self.message_bytes:  # which the shell sees
            return self.tell(session.end(Ending(End.TOO_BIG), self.now), was_over)
        before = (session.dialect.phase, session.has_slot, session.deadline)
        # The shell does so with long ones; it must make no difference.
        is_unwrapped = b'"UklGR' in frame and len(frame) % 2 == 0
        event = unwrap(frame, self.case.limits) if is_unwrapped else frame
        told = session.receive(event, self.now)
        events = self.tell(told, was_over)
        if sum(map(len, told)) > _ANSWER_BYTES:
            raise IllegalError(f"{sum(map(len, told))} bytes are said to one message")
        if not was_over:
            self._check_answer(frame, events, before)
        return events

    def _is_too_much(self, frame: bytes) -> bool:
        """Tell whether a frame may be refused before it is known to be JSON."""
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
            has_ended = self.session.farewell and self.session.farewell.end is End.UNREADABLE
            if not has_ended and not self._is_too_much(frame):
                raise IllegalError("what is no JSON was taken") from None
            return
        errors = [told for told in events if told["type"] == "error"]
        if errors and not self.is_over:
            if len(events) != 1:
                raise IllegalError(f"a message is refused and answered: {events}")
            session = self.session
            after = (session.dialect.phase, session.has_slot, session.deadline)
            if after != before:
                raise IllegalError(f"what is refused had an effect: {before} to {after}")
            self._check_fault(errors[0]["error"])
        elif not errors and self.dialect != "D":
            self._check_transition(event["type"], before[0])

    def _check_transition(self, kind: str, before: Phase) -> None:
        """Check that what was taken led where it may."""
        dialect = self.session.dialect
        legal = {dialect.transitions.get((before, kind))}
        if before is Phase.START:  # settings may be implied
            legal.add(dialect.transitions.get((Phase.OPENING, kind)))
        if self.chat and Phase.OPENING in legal:
            legal.add(Phase.ACTIVE)  # a chat is ready at once
        if dialect.phase not in legal:
            raise IllegalError(f"{kind} led from {before} to {dialect.phase}")
        self.taken_chunks += kind == "audio_chunk"
        self.taken_turns += self.chat is not None and kind == "input.append"

    def _check_fault(self, fault: Any) -> None:
        """Check that a client that is refused is told what, and nothing long."""
        if isinstance(fault, str):
            if len(fault) > 1024:
                raise IllegalError(f"{len(fault)} characters of error")
            return
        if fault["code"] not in CLIENT_CODES:
            raise IllegalError(f"a client's message is answered by {fault['code']}")
        is_named = fault["code"] == "not_ready" or _NAMED.match(fault["message"])
        if not is_named or len(fault["message"]) > 1024:
            raise IllegalError(f"names no field, or too long: {fault['message'][:200]}")

    # --- the fabric, and time ---

    def _scheduler(self, line: Line) -> None:
        session = self.session
        is_waiting = self.chat.wants_slot if self.chat else not session.has_slot
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
            self.tell(session.lost(error, self.now), was_over=self._was_over)

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
                    self.tell(self.session.lost(error, self.now), was_over=self._was_over)
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
            told = chat.told(chat_response_of(Step(0, "worker", line.what, line.rest)), self.now)
            self._count_answer_to_turn(self.tell(told, was_over=self._was_over))

    def _count_answer_to_turn(self, events: list[Any]) -> None:
        kinds = [event["type"] for event in events]
        self.answered_turns += kinds.count("response.done") + kinds.count("error")

    def _duplex_worker(self, line: Line) -> None:
        if line.what not in ("opened", "delta", "failed", "closed"):
            return
        response = response_of(Step(0, "worker", line.what, line.rest))
        if not self.is_over and not self._can_say(response):
            return
        self._fabric(Line("worker", line.what, _json_of(response, line.what)))
        events = self.tell(self.session.answered(response, self.now), was_over=self._was_over)
        kinds = [event["type"] for event in events]
        if line.what == "opened" and not self._was_over:
            self.is_opened = True
            if events[:1] and kinds[0] not in ("session.created", "prepared"):
                raise IllegalError(f"what is opened is answered by {kinds[0]}")
        if line.what in ("delta", "failed"):
            self.answered_chunks += kinds.count("error")
        if line.what == "delta" and not self._was_over and self.dialect != "C" and not events:
            raise IllegalError("nothing is said of a unit")

    def _can_say(self, response: session_pb2.ConverseResponse) -> bool:
        """Tell whether a worker could say this now, and let it be about a unit that was sent."""
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
            if not self.session.deadline <= self.now.monotonic_s:
                return
            was_over = self.is_over
            self.tell(self.session.expire(self.now), was_over)
        raise IllegalError(f"a deadline is always over: {self.session.deadline}")

    def end(self, end: End, line: Line) -> None:
        self.log.append(("end", line))
        was_over = self.is_over
        self.tell(self.session.end(Ending(end), self.now), was_over)

    def take_requests(self, *, is_hoarding: bool = False) -> None:
        """Take what the session has for the worker, as the shell does."""
        if self.chat:
            turn = self.chat.next_turn(self.now)
            if turn is not None:
                if not turn.messages or self.is_over:
                    raise IllegalError("a turn of nothing")
                turn.SerializeToString()
                self.log.append(("turn", turn))
            return
        while not (is_hoarding and self.is_opened) and (request := self.session.next_request()):
            self.log.append(("request", request))
            self._check_request(request)

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

    # --- what is said, and what is held ---

    def tell(self, told: list[bytes], was_over: bool) -> list[Any]:
        """Check what the session says to its client."""
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
        farewell = self.session.farewell
        assert farewell
        expected = CLOSE_CODES[farewell.end]
        if farewell.code != expected and (self.dialect, farewell.code) != ("D", 1000):
            raise IllegalError(f"{farewell.end} closes with {farewell.code}")
        if len(close_reason(farewell.reason).encode()) > 123:
            raise IllegalError("a reason that no closing frame holds")
        last: dict[str, Any] = events[-1] if events else {"type": None, "error": None}
        if farewell.end in _UNTOLD:
            is_told = not events
            if self.dialect == "D" and farewell.end is End.UNREADABLE:
                is_told = last["type"] == "error"
        elif farewell.end in REFUSALS and self.dialect not in ("C", "D"):
            code = REFUSALS[farewell.end]
            is_told = last["type"] == "error" and last["error"]["code"] == code
        else:
            is_told = last["type"] in (*CLOSINGS[self.dialect], "error")
        if not is_told:
            raise IllegalError(f"{farewell.end} is told by {last}")
        if self.session.next_request() or self.session.dialect.phase is not Phase.CLOSED:
            raise IllegalError("a session that is over goes on")
        if self.chat and (self.chat.wants_slot or self.chat.next_turn(self.now)):
            raise IllegalError("a chat that is over wants a slot")

    def _check_state(self) -> None:
        session = self.session
        if self.is_over:
            if session.deadline != float("inf"):
                raise IllegalError("a session that is over waits")
            return
        is_paused = session.dialect.phase is Phase.PAUSED  # which the worker bounds
        if not is_paused and not session.deadline < float("inf"):
            raise IllegalError("something is waited for without a bound")
        self._check_held(session)
        if self.dialect == "C" and self.answered_chunks > self.taken_chunks:
            raise IllegalError(f"{self.answered_chunks} answers to {self.taken_chunks} chunks")
        if self.chat and self.answered_turns > self.taken_turns:
            raise IllegalError(f"{self.answered_turns} answers to {self.taken_turns} turns")

    def _check_held(self, session: Session) -> None:
        """Check the bounds that `Limits` state of what is held for a client."""
        limits, uplink, owed = self.case.limits, session._uplink, session._owed
        gatherer = uplink._gatherer
        most_units = max(limits.early_unit_count, limits.pending_unit_count)
        held = {
            "units": (len(uplink._waiting), most_units),
            "bytes of a unit": (gatherer._held_bytes, UNIT_BYTES - 4),
            "pictures": (len(gatherer._frames), limits.frame_count),
            "answers owed": (len(owed._ends), owed._LIMIT),
            "outcomes": (len(owed._outcomes), owed._LIMIT),
            "units sent": (len(uplink._sent), uplink._UNANSWERED),
            "requests": (len(session._requests), most_units + 2),
            "turns": (len(self.chat._turns) if self.chat else 0, limits.pending_turn_count + 1),
        }
        for name, (count, bound) in held.items():
            if count > bound:
                raise IllegalError(f"{count} {name} are held, {bound} is the bound")


def _json_of(response: session_pb2.ConverseResponse, kind: str) -> str:
    part = getattr(response, kind)
    return json_format.MessageToJson(part, preserving_proto_field_name=True, indent=None)
