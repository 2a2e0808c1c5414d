"""Moves a conversation to another worker when its worker is lost, drains or hangs. Pure.

The edge sends the settings and the journal to the next worker, then the units that have no outcome.
While the former worker still answers, the journal grows, and the next worker also gets the new past
units. Then the session changes to the next worker, between two units.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from duplane.edge.clock import Moment
from duplane.edge.session.journal import Journal
from duplane.edge.session.request_queue import RequestQueue
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.v1 import session_pb2

# If a session loses more than _MAX_MOVES workers within _WITHIN_S, it may be the cause of these
# losses, so it ends. A unit that ends two workers is found sooner: see `take_back`.
_MAX_MOVES = 3
_WITHIN_S = 20.0
# A session prepares to leave a slow worker at most once in _OVERDUE_PAUSE_S. This pause doubles, up
# to _MAX_OVERDUE_PAUSE_S, with each preparation, even one that moves the session: if all workers
# are overloaded, preparations make them even slower. After _QUIET_PAUSES such pauses without a
# preparation, the first pause counts again.
_OVERDUE_PAUSE_S = 10.0
_MAX_OVERDUE_PAUSE_S = 640.0
_QUIET_PAUSES = 4
# While the next worker rebuilds the last past units, the session sends no units. To keep this time
# short, it begins only when at most _FEW_UNITS past units are left, or after _MAX_CATCH_UPS more
# messages with past units.
_FEW_UNITS = 1
_MAX_CATCH_UPS = 3


class MoveCause(StrEnum):
    """Why a conversation leaves its worker."""

    # The connection to the worker failed, or the worker does not answer.
    WORKER_LOST = "worker_lost"
    MODEL_FAILED = "model_failed"
    SHUTDOWN = "shutdown"
    OTHER_MODEL = "other_model"  # the worker that was found for a move has another model
    DRAIN = "drain"  # the worker will end its sessions, and still answers
    OVERDUE = "overdue"  # the worker owes an answer for too long; the answer may still come


class MoveOutcome(StrEnum):
    """How an attempt to move has ended."""

    MOVED = "moved"
    FAILED = "failed"
    STAYED = "stayed"  # the worker has answered before another one was ready


_FAILED_CALLS: Mapping[Reason, MoveCause] = {
    Reason.UNAVAILABLE: MoveCause.WORKER_LOST,
    Reason.DRAINING: MoveCause.SHUTDOWN,
    Reason.ENGINE_FAILED: MoveCause.MODEL_FAILED,
}
_CLOSED: Mapping[int, MoveCause] = {
    session_pb2.CLOSE_REASON_UNSPECIFIED: MoveCause.WORKER_LOST,
    session_pb2.CLOSE_REASON_SHUTDOWN: MoveCause.SHUTDOWN,
    session_pb2.CLOSE_REASON_ENGINE_FAILED: MoveCause.MODEL_FAILED,
}


def cause_of(end: FabricError | session_pb2.Closed) -> MoveCause | None:
    """Return why a conversation moves after the end of its call; None if the session ends."""
    if isinstance(end, session_pb2.Closed):
        return _CLOSED.get(end.reason)
    # A foreign error was made by gRPC itself, which has several codes for a broken connection.
    return MoveCause.WORKER_LOST if end.is_foreign else _FAILED_CALLS.get(end.reason)


@dataclass(slots=True, eq=False)
class Move:
    """One attempt to move, with the progress at the next worker.

    Further attempts keep `silent_since`. They also keep `tried_worker_ids`, the workers that this
    session has left or tried in vain since then.
    """

    number: int  # attempts of the session so far, from 1
    attempt: int  # attempts since the session wants to leave its worker, from 1
    cause: MoveCause
    tried_worker_ids: list[str]
    silent_since: Moment | None  # since when units wait; None while the former worker gets them
    is_lost: bool = False  # the former worker answers nothing more
    has_turn: bool = False  # whether it may rebuild although the former worker is not lost
    outcome: MoveOutcome = field(default=MoveOutcome.FAILED, init=False)
    is_open: bool = field(default=False, init=False)
    sent_count: int = field(default=0, init=False)  # past units that were sent
    catch_up_count: int = field(default=0, init=False)
    is_last_sent: bool = field(default=False, init=False)
    is_drained: bool = field(default=False, init=False)  # the next worker drains, too


class Moves:
    """The moves of one conversation. `current` is the move in progress, or None."""

    def __init__(self, journal: Journal, requests: RequestQueue, seed: int) -> None:
        self.journal = journal
        self.current: Move | None = None
        self.on_given_up: Callable[[session_pb2.Failed], None] = lambda _: None
        self._requests = requests
        self._seed = seed
        self._number = 0
        self._is_drained = False  # the present worker drains
        self._lost_s: deque[float] = deque(maxlen=_MAX_MOVES)
        self._late_s = -math.inf  # when the session last prepared to leave a slow worker
        self._late_pause_s = _OVERDUE_PAUSE_S
        self._suspect: int | None = None
        requests.keeps_units = True

    def add_seed(self, settings: session_pb2.Open) -> None:
        """Set the seed if the client has not: all workers must draw the same random numbers."""
        if not settings.HasField("seed"):
            settings.seed = self._seed

    def can_move(self, now: Moment) -> bool:
        """Return whether the conversation can move if its worker is lost now.

        It cannot if its journal was given up, or if it has lost too many workers lately.
        """
        is_recent = bool(self._lost_s) and now.monotonic_s - self._lost_s[0] < _WITHIN_S
        return self.journal.is_whole and not (is_recent and len(self._lost_s) == _MAX_MOVES)

    # --- the present worker ---

    def lose(self, cause: MoveCause, now: Moment) -> bool:
        """Record the loss of the present worker or, if that is lost already, of the next worker.

        Units wait from then on. Returns False if the conversation cannot move. A worker with
        another model was not lost, so it does not count as one of the losses that are allowed.
        """
        is_lost = cause is not MoveCause.OTHER_MODEL
        if not self.journal.is_whole or (is_lost and not self.can_move(now)):
            return False
        if is_lost:
            self._lost_s.append(now.monotonic_s)
        self._is_drained = False
        move = self.current
        if move is None or move.is_lost:
            move = self._begin(cause, move)
        move.cause, move.is_lost = cause, True
        move.silent_since = move.silent_since or now
        return True

    def drain(self, now: Moment) -> None:
        """Prepare to leave the present worker, because it drains.

        If the conversation is not open yet, the preparation begins when it is open.
        """
        self._is_drained = True
        self._prepare(MoveCause.DRAIN, now)

    def opened(self, now: Moment) -> None:
        """Record that the conversation is open at its first worker."""
        if self._is_drained:
            self._prepare(MoveCause.DRAIN, now)

    def is_late(self, now: Moment) -> None:
        """Prepare another worker, and move to it unless the present worker answers before."""
        self._prepare(MoveCause.OVERDUE, now)

    def is_stuck(self, now: Moment) -> None:
        """Prepare another worker, as `is_late` does: the present one may never answer again.

        This also replaces the cause of a move that has begun because the present worker drains.
        """
        self._late_s = -math.inf  # this is no doubtful case
        self.is_late(now)
        if (move := self.current) and not move.is_lost:
            move.cause, move.silent_since = MoveCause.OVERDUE, move.silent_since or now

    def answered(self) -> None:
        """Record that the present worker has answered a unit while a move is in progress."""
        move = self.current
        if move is None or move.is_lost:
            return
        if move.cause is MoveCause.OVERDUE or move.is_last_sent:
            # The next worker does not know this unit, and may get no more past units.
            move.outcome = MoveOutcome.STAYED
            self.stay()

    def _prepare(self, cause: MoveCause, now: Moment) -> None:
        """Begin an attempt while the present worker still answers."""
        if self.current or self.journal.opening is None or not self.journal.is_whole:
            return
        if cause is MoveCause.DRAIN:
            self._begin(cause, None)
        elif (since_s := now.monotonic_s - self._late_s) >= (pause_s := self._late_pause_s):
            is_again = since_s < _QUIET_PAUSES * pause_s
            longer_s = min(2 * pause_s, _MAX_OVERDUE_PAUSE_S)
            self._late_pause_s = longer_s if is_again else _OVERDUE_PAUSE_S
            self._late_s = now.monotonic_s
            self._begin(cause, None).silent_since = now

    def _begin(self, cause: MoveCause, former: Move | None) -> Move:
        self._number += 1
        attempt, tried = (former.attempt + 1, former.tried_worker_ids) if former else (1, [])
        silent_since = former.silent_since if former and former.is_lost else None
        self.current = Move(self._number, attempt, cause, tried, silent_since)
        return self.current

    def take_back(self) -> session_pb2.Failed | None:
        """Take the unanswered units back from the former worker.

        If the first of these units was also the first one at another worker that was left, it may
        be the cause of both losses. Then it is not sent a third time, and its outcome is returned.
        """
        oldest, suspect = self._requests.oldest_sent, self._suspect
        self._requests.move()
        if oldest is None:
            return None
        self._suspect = oldest
        if oldest != suspect:
            return None
        self._requests.skip()
        message = "two workers were lost while they had this unit"
        failed = session_pb2.Failed(sequence=oldest, reason=Reason.UNAVAILABLE, message=message)
        self.on_given_up(failed)
        return failed

    # --- the next worker ---

    def take(self, now: Moment) -> session_pb2.ConverseRequest | None:
        """Return the next message for the next worker, which owes no answer; None if it must wait.

        The last message comes when the former worker has answered all units. Until the next worker
        has answered this message, no worker gets a unit.
        """
        move = self.current
        if move is None or not (move.has_turn or move.is_lost) or move.is_last_sent:
            return None
        if not move.is_open:
            return session_pb2.ConverseRequest(open=self.journal.opening)
        request = self.journal.rebuild(move.sent_count)
        end = move.sent_count + len(request.rebuild.units)
        is_rest = end == self.journal.unit_count
        if is_rest and move.cause is MoveCause.DRAIN:
            is_few = end - move.sent_count <= _FEW_UNITS or move.catch_up_count == _MAX_CATCH_UPS
            if is_few or move.silent_since:
                self._requests.is_open = False
                move.silent_since = move.silent_since or now
                if self._requests.has_unanswered:
                    return None
            else:
                move.catch_up_count += 1
                is_rest = False
        request.rebuild.is_last = move.is_last_sent = is_rest
        move.sent_count = end
        return request

    def next_opened(self, opened: session_pb2.Opened) -> bool:
        """Record that the next worker is open. Return False if it has another model."""
        first = self.journal.opened
        is_same = opened.model_digest == first.model_digest
        if not (self.current and is_same and opened.prompt_token_count == first.prompt_token_count):
            return False
        self.current.is_open = True
        return True

    def next_drains(self) -> None:
        """Record that the next worker drains. The session moves to it, and then leaves it."""
        if self.current:
            self.current.is_drained = True

    def finish(self, now: Moment) -> session_pb2.Failed | None:
        """Change to the next worker, which has rebuilt the conversation.

        Returns the outcome of a unit that is given up, if there is one.
        """
        move = self.current
        assert move
        assert move.is_last_sent
        failed = None if move.is_lost else self.take_back()
        move.outcome = MoveOutcome.MOVED
        self.current = None
        self._is_drained = move.is_drained
        self._requests.is_open = True
        if self._is_drained:
            self._prepare(MoveCause.DRAIN, now)
        return failed

    def stay(self) -> None:
        """End the attempt and stay at the present worker. If it drains, begin another attempt."""
        former, self.current = self.current, None
        assert former
        if not self._requests.is_open:  # a worker drops units that come too fast
            self._requests.is_catching_up = True
        self._requests.is_open = True
        if self._is_drained:
            self._begin(MoveCause.DRAIN, former)
