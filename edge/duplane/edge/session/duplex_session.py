"""A duplex session: turns audio into units, and the output of units into events. Pure.

The session holds one slot from the grant until the session ends.
"""

from __future__ import annotations

import math
from dataclasses import replace

from duplane.edge.client_errors import ClientError, ErrorCode, name_fault
from duplane.edge.clock import Moment
from duplane.edge.close import WORKER_CLOSED, Close, CloseReason
from duplane.edge.dialects.actions import (
    NO_TAG,
    NOTHING_DROPPED,
    Action,
    Append,
    Configure,
    Leave,
    Reply,
)
from duplane.edge.dialects.dialect import OPEN, WAITING, Phase
from duplane.edge.dialects.duplex import DuplexDialect
from duplane.edge.dialects.first_event import detect, implied_init, needs_init
from duplane.edge.payload.fields import Fields
from duplane.edge.session.moving import Move, MoveCause, Moves, cause_of
from duplane.edge.session.pending_replies import PendingReplies
from duplane.edge.session.request_queue import RequestQueue
from duplane.edge.session.session import Decoded, Session
from duplane.edge.session.time_limits import EXPIRED, TimeLimit
from duplane.edge.settings import Limits
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.v1 import lease_pb2, session_pb2

_LOST = Close(CloseReason.FAILED, "the worker was lost")


class DuplexSession(Session[DuplexDialect]):
    """One duplex session.

    With `detects_dialect` the client's first event decides between A and B. Until then `dialect`
    renders the events.
    """

    def __init__(
        self,
        dialect: DuplexDialect,
        limits: Limits,
        now: Moment,
        *,
        detects_dialect: bool = False,
    ) -> None:
        super().__init__(dialect, limits, now)
        self._is_decided = not detects_dialect
        self._settings: session_pb2.Open | None = None
        self.requests = RequestQueue(limits.early_unit_count, limits.frame_count)
        self._replies = PendingReplies()  # used if the dialect replies to appends
        self._is_interrupted = False  # the model must listen to the next append
        self._last_audio_s = -math.inf  # monotonic
        self.moves: Moves | None = None  # None if the session ends when its worker is lost

    @property
    def move(self) -> Move | None:
        """The move in progress: the session waits for another worker or is rebuilt there."""
        return self.moves.current if self.moves else None

    def can_move(self, now: Moment) -> bool:
        """Return whether the conversation continues at another worker if its worker is lost now."""
        return bool(self.moves and self.dialect.phase in OPEN and self.moves.can_move(now))

    @property
    def is_running(self) -> bool:
        """Whether the session has its slot."""
        return self.has_slot

    @property
    def dropped_unit_count(self) -> int:
        """The number of units that were dropped before they were sent."""
        return self.requests.total_dropped_count

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
        if self.dialect.phase in WAITING and self._replies.is_full:
            # The queue of pending replies is full, and replies cannot be sent yet.
            fault = "more audio than can be answered waits already"
            raise ClientError(ErrorCode.NOT_READY, fault, action.tag.input_id)
        if self._is_interrupted:
            action, self._is_interrupted = replace(action, force_listen=True), False
        if self.identity.recording_id:
            self._recorded_audio = action.audio
        count_before = self.requests.unit_count
        self.requests.add(action, self._receipt)
        self._last_audio_s = now.monotonic_s
        if self.dialect.replies_to_appends:
            self._replies.add_append(self.requests.unit_count)
            return self._ready_replies(now)
        if self.requests.unit_count == count_before:
            return self.dialect.incomplete(action.tag, now)
        return []

    def _apply_control(self, action: Action, now: Moment) -> list[bytes]:
        """Apply an event that is not an append."""
        self.dialect.accept(action)
        match action:
            case Configure():
                self._settings = action.settings
                self.time_limits.stop(TimeLimit.SETTINGS)
                if self.has_slot:
                    self._open(action.settings, now)
                return []
            case Reply():
                return self._reply(action, now)
            case Leave():
                return self._leave(action, now)
            case _:
                raise AssertionError(f"a duplex dialect decodes no {type(action).__name__}")

    def _reply(self, reply: Reply, now: Moment) -> list[bytes]:
        if reply.request is not None:
            self.requests.add_request(reply.request)
        self._is_interrupted |= reply.is_interrupt
        if self.dialect.phase is Phase.PAUSED:
            self.time_limits.stop(TimeLimit.AUDIO)
        elif self.dialect.phase is Phase.ACTIVE:
            self.time_limits.start(TimeLimit.AUDIO, self._limits.idle_s, now)
        return list(reply.events)

    # --- the worker ---

    def queued(self, queued: lease_pb2.Queued, now: Moment) -> list[bytes]:
        """Render a queue position, unless the session had a slot before."""
        return [] if self.move else super().queued(queued, now)

    def granted(self, open_s: float, now: Moment) -> list[bytes]:
        """Record that the slot is claimed, and start the time limit of the whole session.

        The worker waits `open_s` for settings; 0 means that the worker's limit is unknown.
        """
        if self.closed:
            return []
        self._leave_queue()
        session_s = self._limits.session_s or self.dialect.mode.session_s
        self.time_limits.start(TimeLimit.WHOLE_SESSION, session_s, now)
        if self._settings is None:
            init_s = min(self._limits.init_s, open_s or math.inf)
            self.time_limits.start(TimeLimit.SETTINGS, init_s, now)
        else:
            self._open(self._settings, now)
        return self.dialect.queue_done()

    def _open(self, settings: session_pb2.Open, now: Moment) -> None:
        """Ask the worker to open a conversation, once there are a slot and settings."""
        if self.moves:
            self.moves.add_seed(settings)
        self.requests.opening = session_pb2.ConverseRequest(open=settings)
        self.time_limits.start(TimeLimit.CONVERSATION, self._limits.open_s, now)

    def responded(self, response: session_pb2.ConverseResponse, now: Moment) -> list[bytes]:
        """Handle a message from the worker."""
        if self.closed:
            return []
        match response.WhichOneof("message"):
            case "delta":
                outcome = response.delta
            case "failed":
                outcome = response.failed
            case _:
                return self._conversation_changed(response, now)
        tag, ordinal, request = self.requests.finish(outcome.sequence)
        if self.dialect.phase not in OPEN or (self.moves and ordinal < 0):
            return []  # no unit was sent, or the unit had an outcome before
        if self.moves:
            self.moves.journal.append(request, outcome)
            self._check_journal()
            if self.moves and self.moves.current:
                self.moves.answered()
        if self.dialect.replies_to_appends:
            self._replies.add_outcome(ordinal, outcome)
            return self._ready_replies(now)
        if isinstance(outcome, session_pb2.Failed):
            return [self.dialect.failed(outcome, now, tag.input_id)]
        dropped = NOTHING_DROPPED
        if outcome.dropped_unit_count or self.requests.has_dropped:
            dropped = self.requests.take_dropped(outcome.dropped_unit_count)
        return self.dialect.delta(outcome, tag, dropped, now)

    def _conversation_changed(
        self, response: session_pb2.ConverseResponse, now: Moment
    ) -> list[bytes]:
        """Handle a message from the worker about the whole conversation."""
        match response.WhichOneof("message"):
            case "opened":
                self.time_limits.stop(TimeLimit.CONVERSATION)
                self.time_limits.start(TimeLimit.AUDIO, self._limits.idle_s, now)
                self._replies.context_token_count = response.opened.prompt_token_count
                events = self.dialect.opened(response.opened, now)
                self.requests.limit = self._limits.pending_unit_count
                self.requests.is_open = self.dialect.phase in OPEN
                self._open_journal(response.opened, now)
                return events + self._ready_replies(now)
            case "leaving" if self.moves:
                if response.leaving.reason == session_pb2.LEAVING_REASON_STUCK_DEVICE:
                    self.moves.is_stuck(now)
                else:
                    self.moves.drain(now)
                return []
            case "closed":
                moved = self._lose(cause_of(response.closed), now)
                if moved is not None:
                    return moved
                reason = WORKER_CLOSED.get(response.closed.reason, CloseReason.FAILED)
                return self.end(Close(reason, response.closed.message), now)
            case _:
                return []

    def _open_journal(self, opened: session_pb2.Opened, now: Moment) -> None:
        """Begin the journal, unless the worker cannot rebuild conversations."""
        if self.moves and self._settings and self.dialect.phase in OPEN:
            self.moves.journal.open(self._settings, opened)
            self._check_journal()
            if self.moves:
                self.moves.opened(now)

    def _check_journal(self) -> None:
        """Keep no more units if the journal was given up: then the session can no longer move."""
        if self.moves and not self.moves.journal.is_whole:
            if self.moves.current:
                self.moves.stay()
            self.moves = None
            self.requests.keeps_units = False

    def _ready_replies(self, now: Moment) -> list[bytes]:
        """Render the replies to appends that are complete."""
        if self.dialect.phase not in OPEN:
            return []
        events: list[bytes] = []
        for outcome in self._replies.ready():
            if isinstance(outcome, session_pb2.Failed):
                events.append(self.dialect.failed(outcome, now))
            else:
                dropped = self.requests.take_dropped(outcome.dropped_unit_count)
                events += self.dialect.delta(outcome, NO_TAG, dropped, now)
        return events

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
        if self.dialect.phase in OPEN:
            return self.end(_LOST, now)
        return self.end(Close(self.dialect.lost_while_opening, _LOST.message), now)

    # --- moves ---

    def _lose(self, cause: MoveCause | None, now: Moment) -> list[bytes] | None:
        """Wait for another worker; return None if the conversation cannot move.

        If the session gives up a unit, the returned events report that this unit has failed.
        """
        moves = self.moves
        if moves is None or cause is None or self.dialect.phase not in OPEN:
            return None
        was_lost = moves.current and moves.current.is_lost
        if not moves.lose(cause, now):
            return None
        if not was_lost:
            self.time_limits.start(TimeLimit.CONVERSATION, self._limits.failover_s, now)
        return self._give_up(moves.take_back(), now)

    def _give_up(self, failed: session_pb2.Failed | None, now: Moment) -> list[bytes]:
        return self.responded(session_pb2.ConverseResponse(failed=failed), now) if failed else []

    def overdue(self, now: Moment) -> None:
        """Prepare another worker, because the present one owes an answer for too long."""
        if self.moves:
            self.moves.is_late(now)

    def next_request(self, now: Moment) -> session_pb2.ConverseRequest | None:
        """Return the next message for the worker to which the session moves; None if it must wait.

        No worker gets units while the last message is rebuilt, so this time is limited.
        """
        request = self.moves.take(now) if self.moves else None
        if request and self.move and self.move.is_last_sent and not self.move.is_lost:
            self.time_limits.start(TimeLimit.CONVERSATION, self._limits.failover_s, now)
        return request

    def next_responded(self, response: session_pb2.ConverseResponse, now: Moment) -> list[bytes]:
        """Handle a message from the worker to which the session moves."""
        moves = self.moves
        if moves is None or moves.current is None:
            return []
        match response.WhichOneof("message"):
            case "opened" if not moves.next_opened(response.opened):
                return self._next_lost(MoveCause.OTHER_MODEL, now)
            case "rebuilt" if moves.current.is_last_sent:
                self.time_limits.stop(TimeLimit.CONVERSATION)
                return self._give_up(moves.finish(now), now)
            case "leaving":
                is_stuck = response.leaving.reason == session_pb2.LEAVING_REASON_STUCK_DEVICE
                if is_stuck and not moves.current.is_lost:
                    moves.stay()
                else:
                    moves.next_drains()
            case "closed":
                return self._next_lost(cause_of(response.closed), now)
            case _:
                pass
        return []

    def next_failed(self, error: FabricError, now: Moment) -> list[bytes]:
        """Handle the failure of a call to the worker to which the session moves."""
        if not self.move:
            return []
        # Another worker has accepted these settings, so the next worker is at fault: try others. A
        # worker also ends a call that has waited too long to begin its rebuild.
        is_refused = error.reason in (Reason.INVALID_FIELD, Reason.OPEN_TIMEOUT)
        return self._next_lost(MoveCause.OTHER_MODEL if is_refused else cause_of(error), now)

    def _next_lost(self, cause: MoveCause | None, now: Moment) -> list[bytes]:
        """Stay at the present worker. If that is lost, try another one, or end the session."""
        assert self.moves
        if self.moves.current and not self.moves.current.is_lost:
            self.moves.stay()
            return []
        moved = self._lose(cause, now)
        return self.end(_LOST, now) if moved is None else moved

    def _end_attempt(self, now: Moment) -> list[bytes]:
        """Give up the next worker, because it is too slow.

        If the present worker is lost, end the session.
        """
        self.time_limits.stop(TimeLimit.CONVERSATION)
        if self.move and self.move.is_lost:
            return self.end(_LOST, now)
        if self.moves and self.move and self.move.is_last_sent:
            self.moves.stay()
        return []

    def _expire(self, limit: TimeLimit, now: Moment) -> list[bytes]:
        if limit is TimeLimit.CONVERSATION and self.dialect.phase in OPEN:
            return self._end_attempt(now)
        if limit is TimeLimit.CONVERSATION:
            return self.failed(FabricError(Reason.UNAVAILABLE, "the worker is silent"), now)
        if limit is TimeLimit.AUDIO:
            # An append does not restart this limit, because that would take time for each append.
            # So check here whether audio has come since the limit was started.
            rest_s = self._last_audio_s + self._limits.idle_s - now.monotonic_s
            if rest_s > 0:
                self.time_limits.start(TimeLimit.AUDIO, rest_s, now)
                return []
        return super()._expire(limit, now)

    def end(self, close: Close, now: Moment) -> list[bytes]:
        """End the session. Only the first call has an effect."""
        self.requests.close()
        if self.moves:
            self.moves.journal.drop()
            self.moves.current = None
        return super().end(close, now)
