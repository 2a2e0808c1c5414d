"""A duplex session whose client may return on another socket: what is lost, held and told. Pure.

`Detachment` has the token and the events of the session; `Moves` has its slots.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence

import orjson

from duplane.edge.client_errors import ErrorCode
from duplane.edge.clock import Moment
from duplane.edge.close import GONE, Close, CloseReason
from duplane.edge.dialects.actions import NO_TAG, Append, Return, Tag
from duplane.edge.dialects.dialect import Phase
from duplane.edge.dialects.duplex import DuplexDialect, RestoredSettings
from duplane.edge.dialects.resumption import read_return, reads_return
from duplane.edge.payload.fields import Fields
from duplane.edge.session.continuity import NO_CONTINUITY, Continuity
from duplane.edge.session.detachment import KEPT_S, Detachment, Presence
from duplane.edge.session.edge_note import EdgeNote
from duplane.edge.session.effects import RecordAnswered, RecordResumed
from duplane.edge.session.move_table import MoveCause, MovePhase
from duplane.edge.session.moves import Moves
from duplane.edge.session.pending_replies import PendingReplies
from duplane.edge.session.session import Decoded, Session
from duplane.edge.session.slot import Slot
from duplane.edge.session.time_limits import TimeLimit
from duplane.edge.session.unit_state import Cursor, UnitState
from duplane.edge.settings import Limits
from duplane.fabric.attaching import TakenSession
from duplane.fabric.audio import SAMPLE_BYTES
from duplane.fabric.bounds import MAX_KEEP_S, WINDOW_COUNT
from duplane.fabric.durations import to_duration, to_seconds
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.token_secrets import digest_of
from duplane.fabric.v1 import lease_pb2, session_pb2

_RETURNED = Close(CloseReason.RETURNED)
# A client that has no slot, and whose sessions may be here, has so much time to name its session
# before it is refused.
NAMING_S = 1.0
_MAX_REPLY_ENDS = 64  # in a note; further appends are replied to with those after them
# A client that waits has so many seconds more than it was asked for to go to another edge.
_LEAVING_S = 5.0
# Seconds until a session that would give its slot back looks again whether its copy is whole.
_COPY_CHECK_S = 0.1


class ReturnableSession(Session[DuplexDialect]):
    """The part of a duplex session that concerns its sockets."""

    def __init__(
        self,
        dialect: DuplexDialect,
        limits: Limits,
        now: Moment,
        continuity: Continuity = NO_CONTINUITY,
        *,
        is_decided: bool = True,
    ) -> None:
        super().__init__(dialect, limits, now, is_decided=is_decided)
        self.moves = Moves(limits.frame_count, self.effects, continuity)
        self._kept_space = continuity.journals  # also for the events that are kept
        self.detachment: Detachment | None = None  # of a resumable session that has begun
        self.replies = PendingReplies()  # used if the dialect replies to appends
        self.is_resumable = False
        self.is_leaving = False  # the edge shuts down
        self.returned: Return | None = None  # the client has returned to another session
        # Whether the client may have another session here.
        self.may_be_return: Callable[[], bool] = lambda: False
        self._noted: EdgeNote | None = None  # of a session that another edge has begun
        self._refusal: Close | None = None  # why the client gets no slot
        self._received_sample_count = 0
        self._lost_sample_count = 0  # samples that the client no longer has
        self._last_audio_s = -math.inf  # monotonic
        self._is_adopted = False  # another edge has had the session until now
        # The session was taken from another edge and has no slot yet. Its former worker has a copy.
        self.is_kept_elsewhere = False
        self._returned_s: float | None = None  # since when a client that is back waits

    # --- the client ---

    def _decode_event(self, event: Fields) -> Decoded[DuplexDialect]:
        """Decode an event; the first one may ask for another session."""
        dialect = self.dialect
        if dialect.phase is Phase.START and reads_return(event, dialect.return_event, self._limits):
            return Decoded(dialect, returned=read_return(event), is_decided=self._is_decided)
        return super()._decode_event(event)

    def _return(self, returned: Return, now: Moment) -> list[bytes]:
        """Leave the client to the session that it names; `Resumes` finds that."""
        self.returned = returned
        return self.end(_RETURNED, now)

    def _count_audio(self, append: Append, now: Moment) -> None:
        self._last_audio_s = now.monotonic_s
        self._received_sample_count += len(append.audio) // SAMPLE_BYTES

    def _slot_refused(self, close: Close, now: Moment) -> list[bytes]:
        is_first = self.dialect.phase is Phase.START and self._refusal is None
        if is_first and self.dialect.return_event and self.may_be_return():
            self._refusal = close
            self.time_limits.stop(TimeLimit.SCHEDULER, TimeLimit.SLOT)
            self.time_limits.start(TimeLimit.REFUSAL, NAMING_S, now)
            return []
        return super()._slot_refused(close, now)

    # --- events ---

    def _begin_detachment(self, events: list[bytes]) -> list[bytes]:
        """Add the token to the last of `events`, which tell that the conversation is ready."""
        kept_unit_count = self.moves.queue.model.unit_count(KEPT_S)
        self.detachment = detachment = Detachment(kept_unit_count, self._kept_space)
        self.dialect.turn_names = detachment.turn_id
        token = f"{self.identity.session_id}.{detachment.new_secret()}"
        resume = {"token": token, "within_s": self._limits.resume_s}
        ready = b"".join((events[-1][:-1], b',"resume":', orjson.dumps(resume), b"}"))
        return [*events[:-1], ready]

    def _note_state(self, detachment: Detachment, unit: int, tag: Tag) -> None:
        """Keep the state of the dialect before it renders a unit."""
        detachment.states.append(self._state(detachment, unit, tag))

    def _state(self, detachment: Detachment, unit: int, tag: Tag = NO_TAG) -> UnitState:
        ends: Sequence[int] = ()
        if self.dialect.replies_to_appends:
            queue = self.moves.queue
            ends = [end - queue.dropped_total for end in self.replies.ends][:_MAX_REPLY_ENDS]
        return UnitState(unit, detachment.cursor, self.dialect.state(), tag, ends)

    def note(self, now: Moment) -> EdgeNote:
        """Return what another edge needs to go on with this session. Only for resumable ones."""
        detachment = self.detachment
        if detachment is None:
            raise AssertionError("the session is not resumable")
        queue, settings = self.moves.queue, self.dialect.kept_settings()
        left_s = self.time_limits.left_s(TimeLimit.WHOLE_SESSION, now)
        return EdgeNote(
            self.identity,
            self.dialect.name,
            "video" if self.dialect.mode.takes_frames else "audio",
            detachment.turn_key,
            self._state(detachment, detachment.cursor.unit + 1),
            self._next_sample,
            None if left_s is None else now.wall_s + left_s,
            tuple(detachment.states),
            {unit: sent.tag for unit, sent in queue.sent.items() if sent.tag is not NO_TAG},
            settings.max_slice_count,
            settings.paths,
            queue.speech.noted(),
        )

    def restore(self, note: EdgeNote, returned: Return, now: Moment) -> int:
        """Go on with a session of another edge, whose conversation a worker has.

        Return the first unit whose delta must be rendered (`DuplexSession.render_again`). After the
        deltas of all units that the worker has, `resume` returns the events for the client.
        """
        cursor = Cursor(returned.unit, returned.part)
        self._noted = note
        state = note.state_for(cursor)
        settings = RestoredSettings(note.paths, note.max_slice_count)
        self.dialect.restore(state.dialect, settings)
        self.replies.restore(note.reply_ends_from(state), state.unit)
        self.moves.queue.speech.restore(*note.speech, state.unit)
        self.is_resumable = True
        kept_unit_count = self.moves.queue.model.unit_count(KEPT_S)
        self.detachment = detachment = Detachment(kept_unit_count, self._kept_space)
        detachment.restore(note.turn_key, digest_of(returned.secret), state.cursor)
        self.dialect.turn_names = detachment.turn_id
        self._lost_sample_count = note.next_sample
        self._leave_queue()
        if note.ends_at_s is not None:
            left_s = note.ends_at_s - now.wall_s
            self.time_limits.start(TimeLimit.WHOLE_SESSION, max(left_s, 0.0), now)
        self.time_limits.start(TimeLimit.AUDIO, self._limits.idle_s, now)
        return state.unit

    def _use_noted_state(self, unit: int) -> Tag:
        """Restore the state before a unit, if the note has it. Return the tag of the unit.

        Between two units, the first edge may have replied to appends that completed none.
        """
        note, detachment = self._noted, self.detachment
        if note is None or detachment is None:
            raise AssertionError("the session was not restored")
        if state := next((one for one in (*note.units, note.latest) if one.unit == unit), None):
            self.dialect.restore(state.dialect, self.dialect.kept_settings())
            detachment.cursor = state.cursor
        return note.tag_of(unit)

    @property
    def _next_sample(self) -> int:
        """The first sample of the client's input that no unit so far has."""
        return self._lost_sample_count + self.moves.queue.taken_sample_count

    def _number(self, events: list[bytes], now: Moment, unit: int | None = None) -> list[bytes]:
        """Number and keep the events about a unit, if the client may return.

        Events of no `unit` count as events of the unit before them.
        """
        detachment = self.detachment
        if detachment is None:
            return events
        unit = detachment.cursor.unit if unit is None else unit
        numbered = detachment.number(events, unit, self._next_sample)
        if self._returned_s is not None and events and not detachment.is_detached:
            self.effects.append(RecordAnswered(now.monotonic_s - self._returned_s))
            self._returned_s = None
        return numbered

    # --- sockets ---

    @property
    def is_detached(self) -> bool:
        """Whether the session has no socket, and goes on."""
        return self.detachment is not None and self.detachment.is_detached

    @property
    def may_go_on_elsewhere(self) -> bool:
        """Whether the session has ended only because it has no socket, and a worker has a copy.

        It ends so while this edge shuts down, and while it waits here for its first slot.
        """
        if self.closed is None or self.detachment is None:
            return False
        return self.closed.may_return and (self.is_leaving or self.is_kept_elsewhere)

    def detach(self, now: Moment) -> bool:
        """Record that the socket is lost. Return False if the session ends with it."""
        detachment = self.detachment
        is_over = self.closed or self.is_leaving or self.is_kept_elsewhere
        if is_over or detachment is None or detachment.presence is not Presence.ATTACHED:
            return False
        detachment.lose(now)
        self.time_limits.start(TimeLimit.RETURN, self._limits.resume_s, now)
        self.time_limits.start(TimeLimit.HOLD, self._limits.hold_s, now)
        return True

    @property
    def client_digest(self) -> bytes:
        """A digest of the tenant and the URL, which a client of this session must have, too."""
        return hashlib.sha256(
            orjson.dumps([self.identity.tenant, self.dialect.return_event])
        ).digest()

    def is_of_client_of(self, asking: ReturnableSession) -> bool:
        """Return whether the client of `asking` may have this session."""
        return self.client_digest == asking.client_digest

    def refuses(self, returned: Return, now: Moment) -> tuple[ErrorCode, str] | None:
        """Return why a client cannot have this session; None if it can. This changes nothing."""
        detachment = self.detachment
        if self.closed or detachment is None or not detachment.is_proved_by(returned.secret):
            return ErrorCode.RESUME_REFUSED, "token: it belongs to no session"
        if not detachment.may_resume(now):
            return ErrorCode.RESUME_REFUSED, "the session was resumed too often"
        if detachment.is_ahead(Cursor(returned.unit, returned.part)):
            return ErrorCode.RESUME_STALE, "unit: the session has no such event"
        return None

    def resume(self, returned: Return, now: Moment) -> list[bytes]:
        """Give the session another socket, unless it `refuses`. Return the events for it."""
        detachment = self.detachment
        if detachment is None:
            raise AssertionError("a session without a token was resumed")
        was_parked = detachment.presence is Presence.PARKED
        cursor = Cursor(returned.unit, returned.part)
        heard_s = max(self._last_audio_s, now.monotonic_s - self._limits.ping_s)
        missed = detachment.resume(cursor, heard_s, now)
        self.time_limits.stop(TimeLimit.RETURN, TimeLimit.HOLD)
        self._returned_s = now.monotonic_s
        next_sample = self._lost_sample_count + self._received_sample_count
        lost_count = max((returned.from_sample or 0) - next_sample, 0)
        self._lost_sample_count += lost_count
        outcome = "rebuilt" if was_parked else "attached" if self._is_adopted else "same_edge"
        self._is_adopted = False
        self.effects.append(RecordResumed(outcome, missed.gap_s, missed.unit_count))
        if was_parked:
            self.moves.unpark(now)
            self.time_limits.start(TimeLimit.CONVERSATION, self._limits.resume_s, now)
        elif self.moves.present.is_draining and self.moves.phase is MovePhase.SETTLED:
            self.moves.drains()
        fields: Mapping[str, object] = {
            "unit": missed.unit,
            "next_sample": next_sample + lost_count,
            "lost_samples": lost_count,
            "gap_s": round(missed.gap_s, 3),
            "within_s": self._limits.resume_s,
        }
        return [self.dialect.notice("resumed", fields, now), *missed.events]

    def _resume_adopted(self, taken: TakenSession, returned: Return, now: Moment) -> list[bytes]:
        """Give the client a session that another edge had. Raises FabricError."""
        detachment = self.detachment
        if detachment is None or not (self.moves.can_park or self.moves.journal.is_partial):
            raise FabricError(Reason.UNKNOWN_SESSION, "the session cannot go on at this edge")
        if returned.unit <= taken.attached.received_sequence:
            # Not rendered again: replies to appends that completed no unit, and failures of units.
            detachment.catch_up(Cursor(returned.unit, returned.part))
        if refusal := self.refuses(returned, now):
            raise FabricError(Reason.COPY_STALE, refusal[1])
        away_s = to_seconds(taken.attached.detached_duration)
        detachment.lose(now._replace(monotonic_s=now.monotonic_s - away_s))
        if taken.stream is None:
            self.is_kept_elsewhere = True
            detachment.park()
            self.moves.park(now)
        self._is_adopted = True
        return self.resume(returned, now)

    def _keep(self, slot: Slot, now: Moment) -> session_pb2.ConverseRequest | None:
        """Return the request to keep a copy, once for each worker that accepts it.

        Without a journal, no edge could go on with the session.
        """
        detachment, has_journal = self.detachment, self.moves.journal.is_whole
        if slot.is_kept or not slot.accepts_keep or detachment is None or not has_journal:
            return None
        slot.is_kept = True
        granted = lease_pb2.Granted()
        granted.CopyFrom(slot.granted)
        granted.ClearField("lease")
        within_s = min(self._limits.resume_s, MAX_KEEP_S)
        keep = session_pb2.Keep(
            token_sha256=detachment.digest,
            within=to_duration(within_s),
            hold=to_duration(min(self._limits.hold_s, within_s)),
            granted=granted,
            edge_note=self.note(now).to_bytes(),
            client_sha256=self.client_digest,
            window_count=min(self._limits.journal_windows, WINDOW_COUNT[1]),
        )
        return session_pb2.ConverseRequest(keep=keep)

    def replaced(self, now: Moment) -> list[bytes]:
        """Render what the former socket is told when another one has the session."""
        return [self.dialect.notice("replaced", {}, now)]

    def go_away(self, after_s: float, now: Moment) -> list[bytes]:
        """Ask the client to go to another edge in `after_s` seconds: this one shuts down.

        From now on the session ends here with its socket; see `may_go_on_elsewhere`.
        """
        self.is_leaving = True
        if self.is_detached:
            return self.end(GONE, now)
        within_s = self._limits.drain_s
        if not self.is_running:
            within_s = min(after_s + _LEAVING_S, within_s)
            self.time_limits.start(TimeLimit.DRAIN, within_s, now)
        fields = {"within_s": within_s, "after_s": round(after_s, 3)}
        return [self.dialect.notice("go_away", fields, now)]

    def _park(self, now: Moment, cause: MoveCause | None = None) -> list[bytes] | None:
        """Give the slot back until the client returns; return None if that is not possible."""
        detachment = self.detachment
        if detachment is None or not self.moves.can_park:
            return None
        if detachment.presence is Presence.HELD:
            self.time_limits.stop(TimeLimit.HOLD, TimeLimit.CONVERSATION)
            detachment.park()
            self.moves.park(now, cause)
        return []

    def _expire(self, limit: TimeLimit, now: Moment) -> list[bytes]:
        if limit is TimeLimit.HOLD:
            if self.moves.journal.is_partial:  # it is whole, or given up, within LATER_COPY_S
                self.time_limits.start(TimeLimit.HOLD, _COPY_CHECK_S, now)
                return []
            self.time_limits.stop(TimeLimit.HOLD)
            parked = self._park(now)
            return self.end(GONE, now) if parked is None else parked
        if limit is TimeLimit.REFUSAL and self._refusal:
            return self.end(self._refusal, now)
        return super()._expire(limit, now)

    def end(self, close: Close, now: Moment) -> list[bytes]:
        """End the session. Only the first call has an effect."""
        if not self.closed:
            self.moves.close(now)
            if self.detachment:
                self.detachment.end()
        return super().end(close, now)
