"""A duplex session: turns audio into units, and the output of units into events. Pure.

The session holds one slot from the grant until the session ends; `Moves` changes this slot.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from duplane.edge.client_errors import ClientError, ErrorCode, name_fault
from duplane.edge.clock import Moment
from duplane.edge.close import WORKER_CLOSED, Close, CloseReason
from duplane.edge.dialects.actions import (
    NO_TAG,
    Action,
    Append,
    Command,
    Configure,
    Leave,
    Reply,
    Return,
    Speak,
    SpeechEnding,
)
from duplane.edge.dialects.dialect import OPEN, WAITING, Phase
from duplane.edge.dialects.duplex import DuplexDialect
from duplane.edge.dialects.first_event import detect, implied_init, needs_init
from duplane.edge.dialects.resumption import with_queue_token
from duplane.edge.payload.fields import Fields
from duplane.edge.session.continuity import NO_CONTINUITY, Continuity
from duplane.edge.session.edge_note import EdgeNote
from duplane.edge.session.effects import RecordDropped, TakePlace
from duplane.edge.session.move_table import (
    EARLY,
    LAST_SENT_PHASES,
    LOST_PHASES,
    SILENT,
    MoveCause,
    MovePhase,
    cause_of,
)
from duplane.edge.session.moves import GivenUp
from duplane.edge.session.pending_replies import Outcome
from duplane.edge.session.request_queue import Outgoing, SentUnit
from duplane.edge.session.request_rates import convert_voices
from duplane.edge.session.returnable_session import ReturnableSession
from duplane.edge.session.session import Decoded
from duplane.edge.session.slot import Slot
from duplane.edge.session.speech_requests import NO_NEWS, SpeechEnd
from duplane.edge.session.time_limits import EXPIRED, TimeLimit
from duplane.edge.settings import Limits
from duplane.fabric.attaching import LATER_COPY_S, TakenSession
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.model import DEFAULT_FORMAT, ModelFormat, name_of
from duplane.fabric.v1 import lease_pb2, session_pb2

_ENDINGS = {
    session_pb2.SPEECH_OUTCOME_SPOKEN: SpeechEnding.SPOKEN,
    session_pb2.SPEECH_OUTCOME_INTERRUPTED: SpeechEnding.INTERRUPTED,
}
_LOST = Close(CloseReason.FAILED, "the worker was lost")


class DuplexSession(ReturnableSession):
    """One duplex session.

    With `detects_dialect` the client's first event decides between A and B. Until then `dialect`
    renders the events.
    """

    def __init__(
        self,
        dialect: DuplexDialect,
        limits: Limits,
        now: Moment,
        continuity: Continuity = NO_CONTINUITY,
        *,
        detects_dialect: bool = False,
    ) -> None:
        super().__init__(dialect, limits, now, continuity, is_decided=not detects_dialect)
        self._settings: session_pb2.Open | None = None
        self._model_name = ""  # empty if unknown
        self._is_interrupted = False  # the model must listen to the next append

    @property
    def is_running(self) -> bool:
        """Whether the session has its slot."""
        return self.has_slot

    # --- the client ---

    def _decode_first(self, event: Fields) -> Decoded[DuplexDialect]:
        """Decode an event before the dialect is known.

        An event of a known type decides the dialect.
        """
        kind = event.get("type", object)
        chosen = detect(kind)
        if chosen is None:
            return Decoded(self.dialect, (self.dialect.decode(event),), is_decided=False)
        dialect = chosen(self.identity, self._limits, self.dialect.mode)
        is_implied = needs_init(kind)
        try:
            if not is_implied:
                return Decoded(dialect, (dialect.decode(event),))
            settings = dialect.decode(implied_init())
            return Decoded(dialect, (settings, dialect.decode(event, Phase.OPENING)))
        except ClientError as error:
            # An invalid first append does not imply settings; a later event decides the dialect.
            return Decoded(dialect, error=error, is_decided=not is_implied)

    def _apply(self, action: Action, now: Moment) -> list[bytes]:
        if not isinstance(action, Append):
            return self._apply_control(action, now)
        return self._number(self._append(action, now), now)

    def _append(self, action: Append, now: Moment) -> list[bytes]:
        if self.dialect.grace_s and self.dialect.phase is Phase.START:
            self.dialect.accept(action)
            self.time_limits.start(TimeLimit.GRACE, self.dialect.grace_s, now)
        if self.dialect.phase in WAITING and self.replies.is_full:
            # The queue of pending replies is full, and replies cannot be sent yet.
            fault = "more audio than can be answered waits already"
            raise ClientError(ErrorCode.NOT_READY, fault, action.tag.input_id)
        events = self.dialect.appended(action)
        if not (action.audio or action.frames):
            return events
        if self._is_interrupted or self.dialect.must_listen:
            action = replace(action, force_listen=True)
            self._is_interrupted = self.dialect.must_listen = False
        if self.identity.recording_id:
            self._recorded_audio = action.audio
        self._count_audio(action, now)
        queue = self.moves.queue
        count_before = queue.unit_count
        if dropped := queue.add(action, self._receipt, self._unit_limit):
            self.effects.append(RecordDropped(dropped))
        if self.dialect.replies_to_appends:
            self.replies.add_append(queue.unit_count)
            return self._ready_replies(now)
        if queue.unit_count == count_before:
            events += self.dialect.incomplete(action.tag, now)
        return events

    @property
    def _unit_limit(self) -> int:
        """The largest number of units that may wait."""
        limits, phase = self._limits, self.moves.phase
        is_early = phase in EARLY or phase is MovePhase.LOST_EARLY
        seconds = limits.early_unit_count if is_early else limits.pending_unit_count
        return self.moves.queue.model.unit_count(seconds)

    def _apply_control(self, action: Action, now: Moment) -> list[bytes]:
        """Apply an event that is not an append."""
        if isinstance(action, Speak):
            self._speak(action)
        self.dialect.accept(action)
        match action:
            case Configure(resumption=resumption):
                self.is_resumable = resumption.is_resumable
                if resumption.queue_token and not self.has_slot:
                    self.effects.append(TakePlace(resumption.queue_token))
                self._configured(action.settings, now)
                return []
            case Reply():
                return self._reply(action, now)
            case Command():
                return self._command(action, now)
            case Speak():
                return []
            case Leave():
                return self._leave(action, now)
            case _:
                raise AssertionError(f"a duplex dialect decodes no {type(action).__name__}")

    def _speak(self, speak: Speak) -> None:
        """Let the model speak a text with the next unit, if the present worker can."""
        speech = self.moves.queue.speech
        if speech.is_full:
            fault = f"type: {len(speech.unfinished)} texts wait to be spoken already"
            raise ClientError(ErrorCode.NOT_READY, fault, speak.input_id)
        if self.dialect.phase in OPEN and not self.moves.present.accepts_speech_requests:
            fault = f"type: {speak.kind} is not supported: the model cannot speak given texts"
            raise ClientError(self.dialect.unsupported, fault, speak.input_id)
        speech.add(speak)

    def _configured(self, settings: session_pb2.Open, now: Moment) -> None:
        self._settings = settings
        self.time_limits.stop(TimeLimit.SETTINGS)
        if self.has_slot and self.moves.phase is not MovePhase.LOST_EARLY:
            self._open(settings, now)

    def _command(self, command: Command, now: Moment) -> list[bytes]:
        if command.drops_audio:
            self.moves.queue.drop_rest()
        if self.time_limits.is_running(TimeLimit.GRACE) and command.kind in self.dialect.settling:
            self.time_limits.start(TimeLimit.GRACE, self.dialect.grace_s, now)
        return self.dialect.answer(command, now)

    def _reply(self, reply: Reply, now: Moment) -> list[bytes]:
        if reply.request is not None:
            self.moves.queue.add_request(reply.request)
        self._is_interrupted |= reply.is_interrupt
        if self.dialect.phase is Phase.PAUSED:
            self.time_limits.stop(TimeLimit.AUDIO)
        elif self.dialect.phase is Phase.ACTIVE:
            self.time_limits.start(TimeLimit.AUDIO, self._limits.idle_s, now)
        return list(reply.events)

    # --- the worker ---

    def queued(self, queued: lease_pb2.Queued, now: Moment) -> list[bytes]:
        """Render a queue position, unless the session had a slot before."""
        events = [] if self.has_slot else super().queued(queued, now)
        if events and self.is_resumable and queued.queue_token:
            events[-1] = with_queue_token(events[-1], queued.queue_token)
        return events

    def claimed(
        self, slot: Slot, granted: lease_pb2.Granted, open_s: float, now: Moment
    ) -> list[bytes]:
        """Record that a slot is claimed: the first one, or the one of the next worker.

        The first worker waits `open_s` for settings; 0 means that its limit is unknown.
        """
        if self.closed:
            return []
        self.moves.claimed(slot, granted, now)
        if slot is not self.moves.present:
            return []
        return self.granted(open_s, now, ModelFormat.of(granted.model), name_of(granted))

    def granted(
        self,
        open_s: float,
        now: Moment,
        model: ModelFormat = DEFAULT_FORMAT,
        model_name: str = "",
    ) -> list[bytes]:
        """Begin at a worker that has no conversation yet: its slot is claimed.

        From now on, the units are those of `model`. With the first slot, the time limit of the
        whole session starts. The client does not notice that such a worker was lost.
        """
        if self.closed:
            return []
        self._model_name = model_name
        had_slot = self.has_slot
        self.time_limits.stop(TimeLimit.CONVERSATION)
        self._use_model(model)
        if not had_slot:
            self._leave_queue()
            session_s = self._limits.session_s or self.dialect.mode.session_s
            self.time_limits.start(TimeLimit.WHOLE_SESSION, session_s, now)
            self.dialect.started(session_s, now)
        if self._settings is not None:
            self._open(self._settings, now)
        elif not had_slot:
            init_s = min(self._limits.init_s, open_s or math.inf)
            self.time_limits.start(TimeLimit.SETTINGS, init_s, now)
        return [] if had_slot else self.dialect.queue_done()

    def _use_model(self, model: ModelFormat) -> None:
        """Cut the units for `model`, also those that wait."""
        limit = model.unit_count(self._limits.early_unit_count)
        recut = self.moves.queue.use_model(model, self._receipt, limit)
        self.replies.recut(recut.counts)
        if recut.dropped:
            self.effects.append(RecordDropped(recut.dropped))

    def _open(self, settings: session_pb2.Open, now: Moment) -> None:
        """Ask the worker to open a conversation, once there are a slot and settings."""
        rates = self.dialect.input_sound.rate_hertz, self.moves.queue.model.input_rate_hertz
        self.moves.open(convert_voices(settings, *rates))
        self.time_limits.start(TimeLimit.CONVERSATION, self._limits.open_s, now)

    def take(self, now: Moment, slot: Slot | None = None) -> Outgoing | None:
        """Return the next message for the worker of a slot; None if there is none yet.

        Without a `slot`, the message is for the present worker. No worker gets units while the next
        one rebuilds the last past units, so this time is limited.
        """
        moves = self.moves
        before = moves.phase
        slot = slot or moves.present
        if self.is_resumable and (keep := self._keep(slot, now)):
            return Outgoing(keep)
        outgoing = moves.take(slot, now)
        if slot.is_kept and outgoing and outgoing.request.HasField("unit"):
            unit, note = outgoing.request.unit, self.note(now)
            unit.edge_note, unit.edge_note_sequence = note.to_bytes(), note.latest.unit
        if (
            moves.phase is not before
            and moves.phase in LAST_SENT_PHASES
            and moves.phase not in LOST_PHASES
        ):
            self.time_limits.start(TimeLimit.CONVERSATION, self._limits.failover_s, now)
        return outgoing

    def responded(
        self, response: session_pb2.ConverseResponse, now: Moment, slot: Slot | None = None
    ) -> list[bytes]:
        """Handle a message from the worker of a slot, by default of the present worker."""
        moves = self.moves
        if slot and slot is not moves.present:
            return self._next_responded(response, now) if moves.is_next(slot) else []
        if self.closed or moves.phase in SILENT:
            return []
        match response.WhichOneof("message"):
            case "delta":
                outcome = response.delta
                if outcome.state_change.interrupted_turn:  # where workers of release 0.1 report it
                    outcome.interrupted_turn = True
            case "failed":
                outcome = response.failed
            case _:
                moves.heard(now)
                return self._conversation_changed(response, now)
        if self.dialect.phase not in OPEN:
            return []  # no unit was sent
        unit = moves.answered(outcome, now)
        if unit.ordinal < 0 and moves.phase is not MovePhase.FIXED:
            return []  # the unit had an outcome before
        return self._render(unit, outcome, now)

    def _render(self, unit: SentUnit, outcome: Outcome, now: Moment) -> list[bytes]:
        """Render the outcome of a unit, and what it says about texts to speak."""
        queue = self.moves.queue
        if self.detachment:
            self._note_state(self.detachment, outcome.sequence, unit.tag)
        news = queue.speech.answered(outcome) if queue.speech.unfinished else NO_NEWS
        events: list[bytes] = []
        for speak in news.added:
            events += self.dialect.speech_added(speak, now)
        if self.dialect.replies_to_appends:
            self.replies.add_outcome(unit.ordinal, outcome)
            events += self._ready_replies(now)
        elif isinstance(outcome, session_pb2.Failed):
            events += self.dialect.failed(outcome, now, unit.tag.input_id)
        else:
            dropped = queue.take_dropped(outcome.dropped_unit_count)
            events += self.dialect.delta(outcome, unit.tag, dropped, now)
        if news.ended:
            events += self._render_ends(news.ended, now)
        return self._number(events, now, outcome.sequence)

    def render_again(self, outcome: Outcome, now: Moment) -> None:
        """Render the outcome of a unit that another edge has sent; `resume` returns the events."""
        tag = self._use_noted_state(outcome.sequence)
        self._render(SentUnit(tag, outcome.sequence), outcome, now)

    def adopt(
        self, taken: TakenSession, note: EdgeNote, returned: Return, now: Moment
    ) -> list[bytes]:
        """Go on with a session that another edge had. Return the events for its client.

        Raises FabricError if the client has more events than the worker, or if the session cannot
        go on.
        """
        granted = taken.attached.granted
        self._model_name = name_of(granted)
        self._use_model(ModelFormat.of(granted.model))
        self.dialect.use_model(self.moves.queue.model, self._model_name)
        begin = self.restore(note, returned, now)
        self.moves.adopt(taken.attached, now)
        self.moves.present.is_kept = True
        self._copied(taken.past_units, now, is_last=taken.is_whole)
        if self.moves.journal.is_partial:
            self.time_limits.start(TimeLimit.COPY, LATER_COPY_S, now)
        self.moves.queue.restore(taken.attached.received_sequence + 1)
        for delta in taken.deltas:
            if delta.sequence >= begin:
                self.render_again(delta, now)
        self.moves.queue.speech.forget_failed()
        if taken.attached.is_paused:
            self.dialect.phase = Phase.PAUSED
            self.time_limits.stop(TimeLimit.AUDIO)
            self.moves.queue.paused()
        return self._resume_adopted(taken, returned, now)

    def _copied(self, units: Sequence[session_pb2.PastUnit], now: Moment, *, is_last: bool) -> None:
        """Add past units of a session that another edge had. After the last ones it can move."""
        moves = self.moves
        if not moves.journal.is_partial:
            return  # the journal was given up meanwhile
        moves.journal.extend(units)
        if is_last:
            moves.journal.end_copy()
        moves.check_journal(now)
        if not moves.journal.is_partial:
            self.time_limits.stop(TimeLimit.COPY)
            if moves.present.is_draining and not self.is_detached:
                moves.drains()

    def _render_ends(self, ended: Sequence[SpeechEnd], now: Moment) -> list[bytes]:
        events: list[bytes] = []
        for speak, result in ended:
            message = result.message.removeprefix(result.field).strip()
            ending = _ENDINGS.get(result.outcome, SpeechEnding.REFUSED)
            events += self.dialect.speech_ended(speak, ending, message, now)
        return events

    def _conversation_changed(
        self, response: session_pb2.ConverseResponse, now: Moment
    ) -> list[bytes]:
        """Handle a message from the present worker about the whole conversation."""
        match response.WhichOneof("message"):
            case "opened":
                return self._opened(response.opened, now)
            case "leaving":
                if response.leaving.reason == session_pb2.LEAVING_REASON_STUCK_DEVICE:
                    self.stuck(now)
                elif self.is_detached:
                    self.moves.present.is_draining = True  # it leaves when its client is back
                else:
                    self.moves.drains()
            case "staying":
                self.moves.undrained(now)
            case "kept":
                self._copied(response.kept.units, now, is_last=response.kept.is_last)
            case "closed":
                moved = self._lose(cause_of(response.closed), now)
                if moved is not None:
                    return moved
                reason = WORKER_CLOSED.get(response.closed.reason, CloseReason.FAILED)
                return self.end(Close(reason, response.closed.message), now)
            case _:
                pass
        return []

    def _opened(self, opened: session_pb2.Opened, now: Moment) -> list[bytes]:
        self.time_limits.stop(TimeLimit.CONVERSATION)
        self.time_limits.start(TimeLimit.AUDIO, self._limits.idle_s, now)
        self.replies.context_token_count = opened.prompt_token_count
        self.dialect.use_model(self.moves.queue.model, self._model_name)
        events = self.dialect.opened(opened, now)
        if events and self.is_resumable:
            events = self._begin_detachment(events)
        if self.moves.phase is MovePhase.OPENING:
            self.moves.opened(opened, now)
        if not opened.accepts_speech_requests:
            events += self._render_ends(self.moves.queue.speech.refuse_all(), now)
        return events + self._number(self._ready_replies(now), now)

    def _ready_replies(self, now: Moment) -> list[bytes]:
        """Render the replies to appends that are complete."""
        if self.dialect.phase not in OPEN:
            return []
        events: list[bytes] = []
        for outcome in self.replies.ready():
            if isinstance(outcome, session_pb2.Failed):
                events += self.dialect.failed(outcome, now)
            else:
                dropped = self.moves.queue.take_dropped(outcome.dropped_unit_count)
                events += self.dialect.delta(outcome, NO_TAG, dropped, now)
        return events

    def failed(self, error: FabricError, now: Moment, slot: Slot | None = None) -> list[bytes]:
        """Handle a failure of the request for a slot, or of the call to its worker.

        Without a `slot`, it is the slot of the present worker or, if that is lost, of the next one.
        """
        moves = self.moves
        if self.closed or (slot and not moves.uses(slot)):
            return []
        if error.reason is Reason.SUPERSEDED and self.detachment:  # another edge has the session
            return self.replaced(now) + self.end(Close(CloseReason.REPLACED), now)
        if (slot and slot is not moves.present) or moves.phase in LOST_PHASES:
            return self._next_failed(error, now)
        return super().failed(error, now)

    def _call_failed(self, error: FabricError, now: Moment) -> list[bytes]:
        if error.reason is Reason.INVALID_FIELD:
            message = name_fault(error.field, error.message)
            message = self.dialect.setting_path(error.field) + message.removeprefix(error.field)
            events = [self.dialect.error(ErrorCode.INVALID_PAYLOAD, message, now)]
            return events + self.end(Close(CloseReason.FAILED, "settings were refused"), now)
        if error.reason is Reason.OPEN_TIMEOUT:
            return self.end(EXPIRED[TimeLimit.SETTINGS], now)
        moved = self._lose(cause_of(error), now)
        if moved is not None:
            return moved
        return self._end_lost(now)

    def _end_lost(self, now: Moment) -> list[bytes]:
        """End the session, because its worker is lost and it does not move."""
        if self.dialect.phase in OPEN:
            return self.end(_LOST, now)
        return self.end(Close(self.dialect.lost_while_opening, _LOST.message), now)

    # --- moves ---

    def _lose(self, cause: MoveCause | None, now: Moment) -> list[bytes] | None:
        """Wait for another worker; return None if the conversation cannot move.

        The returned events tell this to a client whose conversation was ready. If the session gives
        up a unit, they report that this unit has failed.
        """
        if cause is None or not self.moves.can_leave(cause, now):
            return None
        if self.is_detached:
            return self._park(now, cause)
        events: list[bytes] = []
        if self.moves.phase not in LOST_PHASES:
            self.time_limits.start(TimeLimit.CONVERSATION, self._limits.failover_s, now)
            if self.dialect.phase in OPEN:
                events = self.dialect.moving(self._limits.failover_s, now)
        return events + self._give_up(self.moves.lose(cause, now), now)

    def _give_up(self, given_up: GivenUp | None, now: Moment) -> list[bytes]:
        return self._render(given_up.unit, given_up.failed, now) if given_up else []

    def overdue(self, now: Moment) -> None:
        """Prepare another worker, because the present one owes an answer for too long."""
        if not self.is_detached:  # a session without a socket does not move
            self.moves.late(now)

    def stuck(self, now: Moment) -> None:
        """Prepare another worker, because the device of the present one is stuck."""
        if not self.is_detached:
            self.moves.stuck(now)

    def _next_responded(self, response: session_pb2.ConverseResponse, now: Moment) -> list[bytes]:
        """Handle a message from the worker to which the session moves."""
        kind = response.WhichOneof("message") or ""
        self.moves.next_heard(kind)
        match kind:
            case "opened":
                if not self.moves.next_opened(response.opened):
                    return self._next_lost(MoveCause.OTHER_MODEL, now)
            case "rebuilt":
                return self._rebuilt(now)
            case "leaving":
                is_stuck = response.leaving.reason == session_pb2.LEAVING_REASON_STUCK_DEVICE
                self.moves.next_leaves(is_stuck=is_stuck, now=now)
            case "staying":
                self.moves.next_undrained()
            case "closed":
                return self._next_lost(cause_of(response.closed), now)
            case _:
                pass
        return []

    def _rebuilt(self, now: Moment) -> list[bytes]:
        if self.moves.phase not in LAST_SENT_PHASES:
            return []
        self.time_limits.stop(TimeLimit.CONVERSATION)
        return self._give_up(self.moves.rebuilt(now), now)

    def _next_failed(self, error: FabricError, now: Moment) -> list[bytes]:
        """Handle the failure of a call to the worker to which the session moves."""
        self.moves.next_failed(error)
        # Another worker has accepted these settings, so the next worker is at fault: try others. A
        # worker also ends a call that has waited too long to begin its rebuild.
        is_refused = error.reason in (Reason.INVALID_FIELD, Reason.OPEN_TIMEOUT)
        return self._next_lost(MoveCause.OTHER_MODEL if is_refused else cause_of(error), now)

    def _next_lost(self, cause: MoveCause | None, now: Moment) -> list[bytes]:
        """Stay at the present worker. If that is lost, try another one, or end the session."""
        if self.moves.phase not in LOST_PHASES:
            self.moves.fail(now)
            return []
        moved = self._lose(cause, now)
        return self._end_lost(now) if moved is None else moved

    def _expire(self, limit: TimeLimit, now: Moment) -> list[bytes]:
        if limit is TimeLimit.COPY:
            self.time_limits.stop(TimeLimit.COPY)
            if self.moves.journal.is_partial:
                self.moves.journal.lack_copy()
                self.moves.check_journal(now)
            return []
        if limit is TimeLimit.CONVERSATION:
            self.time_limits.stop(TimeLimit.CONVERSATION)
            if self.moves.phase in LOST_PHASES | EARLY:
                return self._end_lost(now)
            self.moves.expire(now)
            return []
        if limit is TimeLimit.GRACE:
            self.time_limits.stop(TimeLimit.GRACE)
            self._configured(self.dialect.open_settings(), now)
            return []
        if limit is TimeLimit.AUDIO:
            # An append does not restart this limit, because that would take time for each append.
            # So check here whether audio has come since the limit was started.
            rest_s = self._last_audio_s + self._limits.idle_s - now.monotonic_s
            if rest_s > 0:
                self.time_limits.start(TimeLimit.AUDIO, rest_s, now)
                return []
        return super()._expire(limit, now)
