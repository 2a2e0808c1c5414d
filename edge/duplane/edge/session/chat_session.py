"""A chat session: answers turns one after another. Each turn gets a slot of its own. Pure.

The runner acquires a slot when one is needed, runs the next turn on it and releases the slot. In a
dialect with both kinds of sessions, a duplex session replaces the chat once the client's sound must
flow to the model. Such a session needs no slot before its first events have decided its kind.
"""

from __future__ import annotations

import math
import re
from collections import deque

from duplane.edge.client_errors import ClientError, ErrorCode, name_fault
from duplane.edge.clock import Moment
from duplane.edge.close import Close, CloseReason
from duplane.edge.dialects.actions import (
    Action,
    Append,
    CancelTurn,
    Command,
    Configure,
    Leave,
    Reply,
    Speak,
    Turn,
)
from duplane.edge.dialects.chat import ChatDialect
from duplane.edge.dialects.dialect import Phase
from duplane.edge.payload.rates import INPUT_RATE_HERTZ
from duplane.edge.session.continuity import NO_CONTINUITY, Continuity
from duplane.edge.session.duplex_session import DuplexSession
from duplane.edge.session.effects import StopTurn
from duplane.edge.session.request_rates import convert_turn
from duplane.edge.session.session import Decoded, Session
from duplane.edge.session.time_limits import TimeLimit
from duplane.edge.settings import Limits
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.model import DEFAULT_FORMAT, ModelFormat
from duplane.fabric.v1 import session_pb2

_MEDIA_FIELD = re.compile(r"\.(image|audio|video)$")

# If a turn fails for one of these reasons before its first delta, it is tried on another slot.
_SLOT_LOST = frozenset(
    {
        Reason.UNAVAILABLE,
        Reason.DRAINING,
        Reason.SLOT_OCCUPIED,
        Reason.LEASE_STALE,
        Reason.LEASE_EXPIRED,
        Reason.WRONG_EPOCH,
        Reason.WRONG_WORKER,
    }
)


class ChatSession(Session[ChatDialect]):
    """One chat session. `continuity` is that of the duplex session that may replace it."""

    def __init__(
        self,
        dialect: ChatDialect,
        limits: Limits,
        now: Moment,
        continuity: Continuity = NO_CONTINUITY,
    ) -> None:
        super().__init__(dialect, limits, now)
        self._continuity = continuity
        self._successor: DuplexSession | None = None
        self._turns: deque[Turn] = deque()
        self._running: Turn | None = None
        self._has_delta = False  # the client has a part of the answer to the running turn
        self._is_prefilled = False  # the client has the event that the turn was prefilled
        self._model = DEFAULT_FORMAT  # of the granted slot
        self._attempt_count = 0
        self._was_granted = False
        self._is_draining = False
        if dialect.is_one_shot:
            self.time_limits.clear()
            self.time_limits.start(TimeLimit.SETTINGS, limits.init_s, now)
        elif not dialect.begins_with_slot:
            self.time_limits.clear()
            self.time_limits.start(TimeLimit.AUDIO, dialect.idle_s, now)
            self._limit_session(now)

    def _limit_session(self, now: Moment) -> None:
        """Limit the whole session, if its mode has a limit."""
        session_s = self._limits.session_s or self.dialect.mode.session_s
        if session_s < math.inf:
            self.time_limits.start(TimeLimit.WHOLE_SESSION, session_s, now)

    @property
    def successor(self) -> DuplexSession | None:
        """The duplex session that has replaced this one."""
        return self._successor

    @property
    def is_running(self) -> bool:
        """Whether a turn is being answered."""
        return self._running is not None

    @property
    def turn_count(self) -> int:
        """The number of turns that wait."""
        return len(self._turns)

    @property
    def asked_model(self) -> str:
        """The model that the next turn asks for by name; empty if it names none."""
        return self._turns[0].model if self._turns else ""

    @property
    def needs_slot(self) -> bool:
        """Whether the runner must acquire a slot now.

        A turn needs a slot. In a dialect that begins with a slot, the session also needs one before
        any turn, because the grant of this slot gives the client its first `queue_done`.
        """
        if self.closed or self.has_slot or self.is_running:
            return False
        return bool(self._turns) or (self.dialect.begins_with_slot and not self._was_granted)

    @property
    def is_retrying(self) -> bool:
        """Whether the next slot is for a turn that lost its slot; the turn keeps its ticket."""
        return self._attempt_count > 0

    def drain(self, now: Moment) -> list[bytes]:
        """Shut down: end the session after the running turn, or now if no turn runs."""
        self._is_draining = True
        return super().drain(now)

    # --- the client ---

    def _refuse(self, error: ClientError, now: Moment) -> list[bytes]:
        """Answer an invalid event with an `error`. Then a session with only one request ends."""
        if not self.dialect.is_one_shot:
            return super()._refuse(error, now)
        if self.dialect.phase is not Phase.START:
            return []
        return self.end(Close(CloseReason.REQUEST_REFUSED, error.message, code=error.code), now)

    def _apply(self, action: Action, now: Moment) -> list[bytes]:
        if isinstance(action, Turn):
            self._check_room(action)
        self.dialect.accept(action)
        match action:
            case Turn():
                events = self._add_turn(action, now)
            case Append():
                events = self._append(action, now)
            case CancelTurn():
                events = self._cancel_turn(action, now)
            case Command():
                events = self.dialect.answer(action, now)
            case Configure():
                events = self._configure(now)
            case Reply():
                events = list(action.events)
            case Leave():
                events = self._leave(action, now)
            case Speak():
                raise AssertionError("a chat dialect decodes no Speak")
        return events

    def _heard(self, now: Moment) -> None:
        """Begin the time in which the client must say something again."""
        if self.time_limits.is_running(TimeLimit.AUDIO):
            self.time_limits.start(TimeLimit.AUDIO, self.dialect.idle_s, now)

    def _append(self, append: Append, now: Moment) -> list[bytes]:
        """Keep sound for a later turn, or continue as a duplex session, which gets the sound.

        While a turn waits or runs, the dialect keeps the sound.
        """
        is_idle = not (self.is_running or self._turns)
        if is_idle and (continuation := self.dialect.continuation(append)):
            dialect, actions = continuation
            self.time_limits.clear()
            self._successor = DuplexSession(dialect, self._limits, now, self._continuity)
            events = self._successor.receive(Decoded(dialect, actions), now, self._receipt)
            self._recorded_audio = self._successor.take_recorded_audio()
            return events
        self._heard(now)
        if self.identity.recording_id:
            self._recorded_audio = append.audio
        return self.dialect.appended(append)

    def _cancel_turn(self, cancel: CancelTurn, now: Moment) -> list[bytes]:
        """End the turn that waits or runs. Its call to the worker ends immediately."""
        self._stop_turn()
        return self.dialect.cancelled(cancel, now) + self._end_turn(now)

    def _stop_turn(self) -> None:
        self._turns.clear()
        self.time_limits.stop(TimeLimit.SCHEDULER, TimeLimit.SLOT)
        self.effects.append(StopTurn())

    def _check_room(self, turn: Turn) -> None:
        """Raise ClientError if no further turn can be accepted."""
        limit = self._limits.pending_turn_count
        if self._is_draining:
            raise ClientError(ErrorCode.NOT_READY, "the server is shutting down", turn.input_id)
        if len(self._turns) >= limit:
            fault = f"more than {limit} turns wait already"
            raise ClientError(ErrorCode.NOT_READY, fault, turn.input_id)

    def _configure(self, now: Moment) -> list[bytes]:
        self.time_limits.stop(TimeLimit.SETTINGS)
        return self._open(now) if self._was_granted else []

    def _open(self, now: Moment) -> list[bytes]:
        self.time_limits.start(TimeLimit.AUDIO, self.dialect.idle_s, now)
        return self.dialect.opened(session_pb2.Opened(), now)

    def _add_turn(self, turn: Turn, now: Moment) -> list[bytes]:
        is_opening = self.dialect.phase is Phase.OPENING and not self._turns
        events = self._configure(now) if is_opening or self.dialect.is_one_shot else []
        self._turns.append(turn)
        if self.identity.recording_id and not self.dialect.takes_sound:
            self._recorded_audio = _new_audio(turn.request)
        self.time_limits.stop(TimeLimit.AUDIO)
        is_queued = self.time_limits.is_running(TimeLimit.SLOT)
        if not (self.has_slot or self.is_running or is_queued):
            self._await_slot(now)
        return events + self.dialect.taken(turn, now)

    # --- the worker ---

    def granted(
        self,
        claim_s: float | None,
        now: Moment,
        model: ModelFormat = DEFAULT_FORMAT,
        model_name: str = "",
    ) -> list[bytes]:
        """Record a grant of a slot with this model.

        If no turn uses the slot within `claim_s`, it is released; None means no limit.
        """
        if self.closed:
            return []
        self._model = model
        self.dialect.use_model(model, model_name)
        was_queued, is_first = self._is_queued, not self._was_granted
        self._leave_queue()
        self._was_granted = True
        if claim_s is not None:
            self.time_limits.start(TimeLimit.CLAIM, claim_s, now)
        events: list[bytes] = []
        if was_queued or (is_first and self.dialect.begins_with_slot):
            events += self.dialect.queue_done()
        if self.dialect.phase is Phase.OPENING:
            return events + self._open(now)
        if self.dialect.begins_with_slot and self.dialect.phase is Phase.START and not self._turns:
            self.time_limits.start(TimeLimit.SETTINGS, self._limits.init_s, now)
        return events

    def next_turn(self, now: Moment) -> session_pb2.ChatRequest | None:
        """Return the turn to run on the granted slot; None if no turn waits.

        The slot is then used and can run no other turn. Call `convert` with the turn.
        """
        is_ready = self.has_slot and self.dialect.takes_turns and not self.is_running
        if self.closed or not is_ready or not self._turns:
            return None
        self.has_slot = False
        self.time_limits.stop(TimeLimit.CLAIM)
        self.time_limits.start(TimeLimit.CONVERSATION, self._limits.turn_s, now)
        self._running = self._turns.popleft()
        self._has_delta = False
        if not self.is_retrying:
            self._is_prefilled = False
        self.dialect.begin(self._running, now)
        return self._running.request

    @property
    def must_convert(self) -> bool:
        """Whether `convert` takes long enough for a thread: the model has another input rate."""
        return self._model.input_rate_hertz != INPUT_RATE_HERTZ

    def convert(self, turn: session_pb2.ChatRequest) -> session_pb2.ChatRequest:
        """Return the turn with its sound at the rate of the slot's model.

        Changes nothing, so that a thread can run it. Raises FabricError INVALID_FIELD if the turn
        is then too large.
        """
        rates = INPUT_RATE_HERTZ, self._model.input_rate_hertz
        return convert_turn(turn, *rates, self._limits.chat_media_bytes)

    def responded(self, response: session_pb2.ChatResponse, now: Moment) -> list[bytes]:
        """Handle a message from the worker about the running turn."""
        if self.closed or not self.is_running:
            return []
        self.time_limits.start(TimeLimit.CONVERSATION, self._limits.turn_s, now)
        match response.WhichOneof("event"):
            case "prefilled":
                events = self.dialect.prefilled(response.prefilled, now)
                was_prefilled, self._is_prefilled = self._is_prefilled, True
                return [] if was_prefilled else events
            case "delta":
                self._has_delta = True
                events = self.dialect.delta(response.delta, now)
                return self.failed(self._too_long(), now) if self.dialect.is_too_long else events
            case "done":
                events = self.dialect.rest(now) + self.dialect.done(response.done, now)
                return events + self._end_turn(now)
            case _:
                return []

    def call_ended(self, now: Moment) -> list[bytes]:
        """Handle the end of the call to the worker. If `done` is missing, the turn has failed."""
        if not self.is_running:
            return []
        return self.failed(FabricError(Reason.UNKNOWN, "the worker ended the turn early"), now)

    def _too_long(self) -> FabricError:
        limit = self._limits.answer_bytes
        return FabricError(
            Reason.UNKNOWN, f"the answer is more than {limit} bytes: ask for it as a stream"
        )

    def _end_turn(self, now: Moment) -> list[bytes]:
        self._running = None
        self._attempt_count = 0
        self.time_limits.stop(TimeLimit.CONVERSATION)
        if self.dialect.is_one_shot:
            return self.end(Close(CloseReason.ANSWERED), now)
        if self._is_draining:
            return self.end(Close(CloseReason.SHUTDOWN), now)
        if self._turns:
            self._await_slot(now)
        else:
            self.time_limits.start(TimeLimit.AUDIO, self.dialect.idle_s, now)
        return []

    def _slot_refused(self, close: Close, now: Moment) -> list[bytes]:
        """Refuse the turn that gets no slot. A session that needs slots only for turns goes on."""
        code = self.dialect.refusals.get(close.reason)
        if code is None or self.dialect.is_one_shot or self.dialect.begins_with_slot:
            return super()._slot_refused(close, now)
        self._stop_turn()
        return self.dialect.refused(code, close.text, now) + self._end_turn(now)

    def _call_failed(self, error: FabricError, now: Moment) -> list[bytes]:
        self._attempt_count += 1
        is_slot_lost = error.reason in _SLOT_LOST and not self._has_delta
        is_retried = is_slot_lost and self._attempt_count < self._limits.turn_attempt_count
        if self._running and is_retried:
            self._retry(self._running, now)
            return []
        is_ours = error.reason is not Reason.INVALID_FIELD
        code = ErrorCode.INFERENCE_ERROR if is_ours else ErrorCode.INVALID_PAYLOAD
        message = self._client_message(error)
        if self.dialect.is_one_shot:
            reason = CloseReason.FAILED if is_ours else CloseReason.REQUEST_REFUSED
            return self.end(Close(reason, message, code=code), now)
        return self.dialect.refused(code, message, now) + self._end_turn(now)

    def _retry(self, turn: Turn, now: Moment) -> None:
        """Run a turn on another slot, in place of the running one; it keeps its ticket."""
        self._attempt_count = max(self._attempt_count, 1)
        self._turns.appendleft(turn)
        self._running = None
        self.time_limits.stop(TimeLimit.CONVERSATION)
        self._await_slot(now)

    def _client_message(self, error: FabricError) -> str:
        """Return the error's message, with the path that the field has in the client's event."""
        detail = "the worker was lost" if error.is_foreign else error.message
        message = name_fault(error.field, detail)
        if error.field.startswith("messages"):
            path = error.field.replace(".parts[", ".content[")
            names = self.dialect.media_fields
            path = _MEDIA_FIELD.sub(lambda found: f".{names[found[1]]}", path)
            return self.dialect.request_path + path + message.removeprefix(error.field)
        path = self._running.paths.get(error.field, error.field) if self._running else error.field
        return path + message.removeprefix(error.field)

    # --- time ---

    def _expire(self, limit: TimeLimit, now: Moment) -> list[bytes]:
        if limit is TimeLimit.CLAIM:  # the slot was not used in time: release it, without an event
            self.time_limits.stop(TimeLimit.CLAIM)
            self.has_slot = False
            if self._turns:
                self._await_slot(now)
            return []
        if limit is TimeLimit.CONVERSATION:
            return self.end(Close(CloseReason.FAILED, "the worker is silent"), now)
        if limit is TimeLimit.SETTINGS and self.dialect.is_one_shot:
            return self.end(Close(CloseReason.TIMEOUT, "no request in time"), now)
        return super()._expire(limit, now)


def _new_audio(request: session_pb2.ChatRequest) -> bytes:
    """Return the user's audio after the last answer; `request` holds the whole history."""
    parts: list[bytes] = []
    for message in reversed(request.messages):
        if message.role == session_pb2.CHAT_ROLE_ASSISTANT:
            break
        if message.role == session_pb2.CHAT_ROLE_USER:
            parts += [part.audio for part in reversed(message.parts) if part.audio]
    return b"".join(reversed(parts))
