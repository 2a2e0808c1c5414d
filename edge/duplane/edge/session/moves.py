"""The moves of one conversation: from a worker that is lost, drains or hangs to another. Pure.

The edge sends the settings and the journal to the next worker, then the units that have no
outcome. While the present worker still answers, the journal grows, and the next worker also gets
the new past units. Then the session changes to the next worker, between two units.

`move_table` has the phases and the transitions between them. `Moves` makes all decisions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from duplane.edge.clock import Moment
from duplane.edge.session.attempt import Attempt
from duplane.edge.session.continuity import NO_CONTINUITY, Continuity
from duplane.edge.session.effects import (
    Acquire,
    Cancel,
    Effect,
    EndMove,
    RecordFailed,
    RecordFixed,
    ReportUnreachable,
    RequestPermit,
    ReturnPermit,
    Use,
)
from duplane.edge.session.lateness import Lateness
from duplane.edge.session.move_table import (
    CLAIMED_PHASES,
    EARLY,
    FLOWING,
    HELD_PHASES,
    LAST_SENT_PHASES,
    LOST_PHASES,
    MOVABLE,
    MOVING,
    PARKABLE,
    PREPARING,
    SILENT,
    MoveCause,
    MoveEvent,
    MoveOutcome,
    MovePhase,
    after,
    cause_of,
)
from duplane.edge.session.request_queue import UNKNOWN, Outgoing, RequestQueue, SentUnit
from duplane.edge.session.slot import Slot
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.journal import Journal
from duplane.fabric.model import ModelFormat, is_same_model
from duplane.fabric.unit_audio import fit_audio
from duplane.fabric.v1 import lease_pb2, session_pb2

# If a session loses more than _MAX_MOVES workers within _WITHIN_S, it may be the cause of these
# losses, so it ends. A unit that ends two workers is found sooner: see `RequestQueue.take_back`.
_MAX_MOVES = 3
_WITHIN_S = 20.0
# While the next worker rebuilds the last past units, the session sends no units. To keep this time
# short, it begins only when past units of at most _FEW_S are left, or after _MAX_CATCH_UPS more
# messages with past units.
_FEW_S = 1.0
_MAX_CATCH_UPS = 3
# Seconds until a session tries again if it has tried all workers that have a free slot. While its
# own worker still answers, this time doubles with each attempt, up to _MAX_DOUBLINGS times.
_RETRY_S = 0.25
_MAX_DOUBLINGS = 5
_ANSWERED = ("open", "unit")  # messages that the present worker answers
_NEXT_ANSWERS = ("opened", "rebuilt")  # answers of the next worker


class GivenUp(NamedTuple):
    """A unit that is not sent again, and its outcome."""

    unit: SentUnit
    failed: session_pb2.Failed


class Moves:
    """The slots of one conversation, its journal and its queue, and the moves between workers.

    `present` is the slot of the worker that gets the units, or had them last. `attempt` is the last
    attempt to move. The phase says which of both are in use. The methods append what the runner
    must do to `effects`. A method that is not possible in the present phase raises
    IllegalEventError.
    """

    def __init__(
        self, frame_count: int, effects: deque[Effect], continuity: Continuity = NO_CONTINUITY
    ) -> None:
        self.phase = MovePhase.START
        self.present = Slot()
        self.attempt = Attempt()
        self.journal = Journal(continuity.journals)
        self.queue = RequestQueue(frame_count)
        self._effects = effects
        self._continuity = continuity
        self._lost_s: deque[float] = deque(maxlen=_MAX_MOVES)
        self._lateness = Lateness()
        self._is_opening_suspect = False  # a worker was lost while it opened the conversation

    def _fire(self, event: MoveEvent) -> MovePhase:
        """Change the phase, before any other change. Return the former phase."""
        before = self.phase
        self.phase = after(before, event)
        return before

    def is_next(self, slot: Slot) -> bool:
        """Return whether the session moves to this slot."""
        return slot is self.attempt.slot and self.phase in MOVING

    def uses(self, slot: Slot) -> bool:
        """Return whether messages of the worker of this slot count, until the session ends."""
        return (slot is self.present and self.phase not in SILENT) or self.is_next(slot)

    def can_leave(self, cause: MoveCause, now: Moment) -> bool:
        """Return whether the conversation can leave its worker, or the next one if that is lost.

        It cannot without a whole journal, while the journal is partial, or if it has lost too many
        workers lately. A worker with another model was not lost, so it does not count as a loss.
        Settings that a lost worker had may be the cause of its loss, so it cannot leave a second
        worker that is lost before it has opened. The settings do not make a worker shut down.
        """
        if self.phase in EARLY:
            is_suspect = self._is_opening_suspect and _blames_opening(self.phase, cause)
            is_movable = self.journal.is_whole and not is_suspect
        else:
            is_movable = self.phase in MOVABLE and not self.journal.is_partial
        is_recent = bool(self._lost_s) and now.monotonic_s - self._lost_s[0] < _WITHIN_S
        has_lost_many = is_recent and len(self._lost_s) == _MAX_MOVES
        return is_movable and (cause is MoveCause.OTHER_MODEL or not has_lost_many)

    @property
    def may_prepare(self) -> bool:
        """Whether the session has one worker and can prepare another one."""
        return self.phase is MovePhase.SETTLED and not self.journal.is_partial

    # --- the first worker ---

    def open(self, settings: session_pb2.Open) -> None:
        """Set the settings to send to the first worker, with a seed if the client has set none.

        All workers of a session must draw the same random numbers.
        """
        if self.journal.is_whole and not settings.HasField("seed"):
            settings.seed = self._continuity.new_seed()
        self.journal.opening = settings

    def opened(self, opened: session_pb2.Opened, now: Moment) -> None:
        """Record that the first worker has opened the conversation, and begin the journal."""
        self._fire(MoveEvent.OPENED)
        self.present.owed_s = None
        self.present.opened(opened)
        if self.journal.opening:
            self.journal.open(self.journal.opening, opened)
        if not self.journal.is_whole:
            self._fix(now)
        elif self.present.is_draining:
            self.drains()

    def adopt(self, attached: session_pb2.Attached, now: Moment) -> None:
        """Begin with a conversation that another edge had. Its past units come later."""
        self._fire(MoveEvent.OPEN_SENT)
        granted = attached.granted
        # The proof of the ticket is for the former edge. Older schedulers send no other one.
        granted.ticket_proof = granted.session_proof or granted.ticket_proof
        self.present.granted, self.journal.opening = granted, attached.open
        self.opened(attached.opened, now)
        self.journal.begin_copy()
        self._effects.append(Use(self.present))

    def check_journal(self, now: Moment) -> None:
        """Stay at the present worker from now on if the journal was given up."""
        if not self.journal.is_whole and self.phase is not MovePhase.FIXED:
            self._fix(now)

    # --- the present worker ---

    def take(self, slot: Slot, now: Moment) -> Outgoing | None:
        """Return the next message for the worker of a slot; None if it must wait for one."""
        if slot is not self.present:
            return self._take_next(now) if self.is_next(slot) else None
        outgoing = None
        if self.phase in FLOWING:
            outgoing = self.queue.take(is_kept=self.phase is not MovePhase.FIXED)
            if outgoing and outgoing.request.HasField("unit"):
                fit_audio(outgoing.request.unit, is_int16=slot.accepts_audio_int16)
                if self.journal.loss:
                    outgoing.request.unit.cannot_move = True
        elif self.phase is MovePhase.START and self.journal.opening:
            self._fire(MoveEvent.OPEN_SENT)
            outgoing = Outgoing(session_pb2.ConverseRequest(open=self.journal.opening))
        is_answered = outgoing and outgoing.request.WhichOneof("message") in _ANSWERED
        if is_answered and slot.owed_s is None:
            slot.owed_s = now.monotonic_s
        return outgoing

    def answered(self, outcome: session_pb2.Delta | session_pb2.Failed, now: Moment) -> SentUnit:
        """Record the outcome of a unit, and return the unit; UNKNOWN if it had an outcome before.

        The session stays at the present worker if it is only overdue, or if the next worker gets no
        more past units and therefore does not know this unit.
        """
        sent = self.queue.finish(outcome.sequence)
        self.present.owed_s = now.monotonic_s if self.queue.sent else None
        if sent is UNKNOWN or self.phase is MovePhase.FIXED:
            return sent
        self.journal.append(sent.request, outcome)
        if not self.journal.is_whole:
            self._fix(now)
        elif self.phase in PREPARING:
            is_overdue = self.attempt.cause is MoveCause.OVERDUE
            if is_overdue or self.phase in LAST_SENT_PHASES:
                self._stay(MoveEvent.ANSWERED, MoveOutcome.STAYED, now)
        return sent

    def heard(self, now: Moment) -> None:
        """Record a message of the present worker that is not the outcome of a unit.

        Until the worker has opened the conversation, it still owes this answer: see `opened`.
        """
        is_owed = self.queue.sent or self.phase is MovePhase.OPENING
        self.present.owed_s = now.monotonic_s if is_owed else None

    def drains(self) -> None:
        """Prepare to leave the present worker, because it drains.

        If the conversation is not open yet, the preparation begins when it is open.
        """
        self.present.is_draining = True
        if self.may_prepare:
            self._fire(MoveEvent.DRAINS)
            self._begin(MoveCause.DRAIN)

    def undrained(self, now: Moment) -> None:
        """Stay at the present worker, unless another cause than its drain is known."""
        self.present.is_draining = False
        if self.phase in PREPARING and self.attempt.cause is MoveCause.DRAIN:
            self._stay(MoveEvent.UNDRAINED, MoveOutcome.STAYED, now)

    def late(self, now: Moment) -> None:
        """Prepare another worker, and move to it unless the present worker answers before."""
        if not (self._lateness.may_prepare(now.monotonic_s) and self.may_prepare):
            return
        self._lateness.prepare(now.monotonic_s)
        self._fire(MoveEvent.LATE)
        self._begin(MoveCause.OVERDUE)
        self.attempt.silent_since = now

    def stuck(self, now: Moment) -> None:
        """Prepare another worker, as `late` does: the present one may never answer again.

        This also replaces the cause of a move that has begun because the present worker drains.
        """
        self._lateness.forget()  # this is no doubtful case
        self.late(now)
        if self.phase in PREPARING:
            self.attempt.cause = MoveCause.OVERDUE
            self.attempt.silent_since = self.attempt.silent_since or now

    def lose(self, cause: MoveCause, now: Moment) -> GivenUp | None:
        """Leave the present worker, which is lost or, if it is lost already, the next worker.

        Call this only if `can_leave`. Returns a unit that is given up, if there is one.
        """
        before = self._fire(MoveEvent.NEXT_LOST if self.phase in LOST_PHASES else MoveEvent.LOST)
        if cause is not MoveCause.OTHER_MODEL:
            self._lost_s.append(now.monotonic_s)
        if before in LOST_PHASES:
            silent_since = self.attempt.silent_since
            self._end_attempt(before, MoveOutcome.FAILED, now)
            self._begin(cause, self.attempt)
            self.attempt.silent_since = silent_since
            return None
        if cause is MoveCause.WORKER_LOST:
            self._effects.append(ReportUnreachable(self.present.granted))
        if before not in PREPARING:
            self._begin(cause)
        self._is_opening_suspect |= _blames_opening(before, cause)
        self.attempt.cause = cause
        self.attempt.silent_since = self.attempt.silent_since or now
        return self._take_back()

    def _take_back(self, *, blames_unit: bool = True) -> GivenUp | None:
        """Take the units without an outcome back from the present worker."""
        taken = self.queue.take_back(blames_unit=blames_unit)
        if taken is None:
            return None
        sequence, unit = taken
        message = "two workers were lost while they had this unit"
        failed = session_pb2.Failed(sequence=sequence, reason=Reason.UNAVAILABLE, message=message)
        self._effects.append(RecordFailed(failed))
        return GivenUp(unit, failed)

    # --- clients that are away ---

    @property
    def can_park(self) -> bool:
        """Whether the session can give its slot back, and go on in another one later."""
        return self.phase in PARKABLE and self.journal.is_whole and not self.journal.is_partial

    def park(self, now: Moment, cause: MoveCause | None = None) -> None:
        """Give all slots back until `unpark`. Call this only if `can_park`.

        If the present worker is lost, `cause` says why.
        """
        before = self._fire(MoveEvent.PARKED)
        if before in MOVING:
            self._end_attempt(before, MoveOutcome.FAILED, now)
        if before in LOST_PHASES:
            return
        if cause is MoveCause.WORKER_LOST:
            self._effects.append(ReportUnreachable(self.present.granted))
        self.present.owed_s = None
        self._effects.append(Cancel(self.present))
        self._take_back(blames_unit=False)

    def unpark(self, now: Moment) -> None:
        """Acquire a slot again, with the old ticket: the client is back."""
        self._fire(MoveEvent.RETURNED)
        self._begin(MoveCause.RETURNED)
        self.attempt.silent_since = now

    # --- the next worker ---

    def check_grant(self, slot: Slot, granted: lease_pb2.Granted) -> None:
        """Check a granted slot before its claim, so that an unfit worker notices nothing.

        Raises FabricError if it is a slot of the worker that the session wants to leave and that
        still answers, or of a worker with another model.
        """
        attempt = self.attempt
        if slot is self.present or self.phase is MovePhase.LOST_EARLY:
            return
        attempt.tried_workers[granted.worker_id] = granted.worker_incarnation
        if self.phase in PREPARING and granted.worker_id == self.present.granted.worker_id:
            raise FabricError(Reason.UNAVAILABLE, "no other worker has a free slot")
        self._check_model(granted)

    def claimed(self, slot: Slot, granted: lease_pb2.Granted, now: Moment) -> None:
        """Record that a slot is claimed, after `check_grant`.

        If no worker has opened the conversation yet, this slot is now the present one.
        """
        slot.granted = granted
        if slot is self.present:
            self._effects.append(Use(slot))
        elif self._fire(MoveEvent.CLAIMED) is MovePhase.LOST_EARLY:
            self.present = slot
            self._effects.append(Use(slot))
            self._record_end(MoveOutcome.MOVED, now)
        else:
            self._effects.append(RequestPermit(self._continuity.permits, slot))

    def _check_model(self, granted: lease_pb2.Granted) -> None:
        """Raise FabricError if the models are known and differ.

        A scheduler of an older release does not name them. Then the answer to `open` shows a
        difference.
        """
        present = self.present.granted
        are_known = present.HasField("model") and granted.HasField("model")
        if are_known and not is_same_model(present.model, granted.model):
            message = "the worker has another model"
            raise FabricError(Reason.INVALID_FIELD, message, field="granted.model")

    def permitted(self, slot: Slot) -> None:
        """Record that the session may rebuild its conversation in this slot."""
        if self.is_next(slot):
            self._fire(MoveEvent.PERMITTED)
            self.attempt.is_permitted = True

    def _take_next(self, now: Moment) -> Outgoing | None:
        """Return the next message for the next worker; None while it owes an answer."""
        request = None
        if self.attempt.cause is MoveCause.RETURNED and not self.attempt.is_permitted:
            return None  # no worker was lost, so many clients may be back at the same time
        if self.attempt.slot.owed_s is None:
            match self.phase:
                case MovePhase.STARTING | MovePhase.LOST_STARTING:
                    request = session_pb2.ConverseRequest(open=self.journal.opening)
                    self.attempt.rebuilds_since = now
                case MovePhase.CATCHING_UP | MovePhase.HOLDING | MovePhase.LOST_CATCHING_UP:
                    request = self._take_past_units(now)
                case _:
                    pass
        if request is None:
            return None
        self.attempt.slot.owed_s = now.monotonic_s
        return Outgoing(request)

    def _take_past_units(self, now: Moment) -> session_pb2.ConverseRequest | None:
        """Return the next past units for the next worker.

        A draining worker must answer all its units before the last past units are sent. Until the
        next worker has rebuilt these, no worker gets a unit.
        """
        attempt = self.attempt
        request = self.journal.rebuild(
            attempt.sent_count, accepts_exponent=attempt.slot.accepts_audio_exponent
        )
        count = len(request.rebuild.units)
        is_last = attempt.sent_count + count == self.journal.unit_count
        is_drain = attempt.cause is MoveCause.DRAIN
        if is_last and is_drain and self.phase is MovePhase.CATCHING_UP:
            few = ModelFormat.of(self.present.granted.model).unit_count(_FEW_S)
            if count <= few or attempt.catch_up_count == _MAX_CATCH_UPS:
                self._fire(MoveEvent.HELD)
                attempt.silent_since = now
            else:
                attempt.catch_up_count += 1
                is_last = False
        if is_last and is_drain and self.queue.sent and self.phase is MovePhase.HOLDING:
            return None
        if is_last:
            self._fire(MoveEvent.LAST_SENT)
        request.rebuild.is_last = is_last
        attempt.sent_count += count
        return request

    def next_heard(self, kind: str) -> None:
        """Record a message of the next worker, which may answer the last message to it."""
        if kind in _NEXT_ANSWERS:
            self.attempt.slot.owed_s = None

    def next_opened(self, opened: session_pb2.Opened) -> bool:
        """Record that the next worker is open.

        Return False if it has another model, or cannot go on with texts that the model must speak,
        or needs past units that the journal has dropped.
        """
        first = self.journal.opened
        if self.queue.speech.unfinished and not opened.accepts_speech_requests:
            return False
        if self.journal.is_trimmed and not opened.accepts_row_count:
            return False
        is_same = opened.model_digest == first.model_digest
        if not (is_same and opened.prompt_token_count == first.prompt_token_count):
            return False
        self.attempt.slot.opened(opened)
        self.journal.pin(self)  # its units are numbered in the messages that follow
        if self.phase in (MovePhase.STARTING, MovePhase.LOST_STARTING):
            self._fire(MoveEvent.NEXT_OPENED)
        return True

    def next_leaves(self, *, is_stuck: bool, now: Moment) -> None:
        """Record that the next worker drains, or that its device is stuck.

        The session moves to a worker that drains, and then leaves it.
        """
        if is_stuck and self.phase in PREPARING:
            self.fail(now)
        else:
            self.attempt.slot.is_draining = True

    def next_undrained(self) -> None:
        """Record that the drain of the next worker was taken back."""
        self.attempt.slot.is_draining = False

    def rebuilt(self, now: Moment) -> GivenUp | None:
        """Change to the next worker, which has rebuilt the last past units.

        Returns a unit that is given up, if there is one.
        """
        was_lost = self._fire(MoveEvent.REBUILT) in LOST_PHASES
        former = self.present
        self.present = self.attempt.slot
        self._effects.append(ReturnPermit(self._continuity.permits, self.present))
        self._effects.append(Use(self.present))
        if not was_lost and self.attempt.cause is MoveCause.OVERDUE:
            self._effects.append(Cancel(former))
        self._record_end(MoveOutcome.MOVED, now)
        given_up = None if was_lost else self._take_back()
        if self.present.is_draining:
            self.drains()
        return given_up

    def next_failed(self, error: FabricError) -> None:
        """Report the next worker if the connection to it has failed."""
        if self.phase in CLAIMED_PHASES and cause_of(error) is MoveCause.WORKER_LOST:
            self._effects.append(ReportUnreachable(self.attempt.slot.granted))

    def fail(self, now: Moment) -> None:
        """End an attempt because the next worker cannot be used. The present worker answers."""
        self._stay(MoveEvent.NEXT_LOST, MoveOutcome.FAILED, now)

    def expire(self, now: Moment) -> None:
        """End an attempt whose next worker does not rebuild the last past units in time."""
        if self.phase in LAST_SENT_PHASES:
            self._stay(MoveEvent.EXPIRED, MoveOutcome.FAILED, now)

    def overdue_slots(self, overdue_s: float, now: Moment) -> Sequence[Slot]:
        """Return the slots whose workers have owed an answer for longer than `overdue_s`.

        If the session cannot move to another worker, the result is empty: the session waits for
        its worker.
        """
        slots = [
            slot
            for slot in dict.fromkeys((self.present, self.attempt.slot))
            if slot.owed_s is not None
            and now.monotonic_s - slot.owed_s > overdue_s
            and self.uses(slot)
        ]
        return slots if slots and self.can_leave(MoveCause.WORKER_LOST, now) else ()

    def close(self, now: Moment) -> None:
        """End the conversation: the next slot is given back, and the journal is deleted."""
        before = self._fire(MoveEvent.CLOSED)
        if before in MOVING:
            self._end_attempt(before, MoveOutcome.FAILED, now)
        self.journal.drop()

    # --- attempts ---

    def _begin(self, cause: MoveCause, former: Attempt | None = None) -> None:
        """Acquire a slot of another worker. `former` is the attempt that has failed just now."""
        attempt = Attempt(self.attempt.number + 1, 1, cause, self.present.granted.worker_id)
        if former:
            attempt.count = former.count + 1
            attempt.tried_workers = former.tried_workers
        elif cause is not MoveCause.RETURNED:  # then the former worker is as good as any other
            left = self.present.granted
            attempt.tried_workers[left.worker_id] = left.worker_incarnation
        self.attempt = attempt
        is_lost = self.phase in LOST_PHASES
        excess = attempt.count - len(attempt.tried_workers)
        is_first = former is None
        doublings = 0 if is_lost else min(excess - 1, _MAX_DOUBLINGS)
        self._effects.append(
            Acquire(
                attempt.slot,
                attempt.number,
                cause,
                is_lost=is_lost,
                pause_s=_RETRY_S * 2**doublings if excess > 0 and not is_first else 0.0,
                ticket_id=self.present.granted.ticket_id,
                ticket_proof=self.present.granted.ticket_proof,
                avoided_workers=dict(attempt.tried_workers),
            )
        )

    def _stay(self, event: MoveEvent, outcome: MoveOutcome, now: Moment) -> None:
        """End the attempt and stay at the present worker. If it drains, begin another attempt."""
        before = self._fire(event)
        self._end_attempt(before, outcome, now)
        if self.present.is_draining:
            self._fire(MoveEvent.DRAINS)
            self._begin(MoveCause.DRAIN, self.attempt)

    def _fix(self, now: Moment) -> None:
        """End the attempt, if there is one, because the journal was given up or there is none."""
        before = self._fire(MoveEvent.GIVEN_UP)
        if loss := self.journal.loss:
            self._effects.append(RecordFixed(loss))
        if before in PREPARING:
            self._end_attempt(before, MoveOutcome.FAILED, now)
        self.journal.drop()

    def _end_attempt(self, before: MovePhase, outcome: MoveOutcome, now: Moment) -> None:
        """Give the next slot back. `before` is the phase in which the attempt has ended."""
        slot = self.attempt.slot
        self._record_end(outcome, now)
        if before in CLAIMED_PHASES:
            self._effects.append(ReturnPermit(self._continuity.permits, slot))
        self._effects.append(Cancel(slot))
        if before in HELD_PHASES:  # units have waited, and a worker drops units that come too fast
            self.queue.is_catching_up = True

    def _record_end(self, outcome: MoveOutcome, now: Moment) -> None:
        attempt = self.attempt
        self.journal.unpin(self)
        self._effects.append(
            EndMove(
                attempt.cause,
                outcome,
                _seconds_since(attempt.silent_since, now),
                _seconds_since(attempt.rebuilds_since, now),
                attempt.from_worker_id,
                attempt.slot.granted.worker_id,
            )
        )


def _blames_opening(phase: MovePhase, cause: MoveCause) -> bool:
    """Return whether the settings may be the cause of the loss of a worker in this phase."""
    return phase is MovePhase.OPENING and cause is not MoveCause.SHUTDOWN


def _seconds_since(begin: Moment | None, now: Moment) -> float:
    return now.monotonic_s - begin.monotonic_s if begin else 0.0
