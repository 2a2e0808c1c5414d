"""Moves a conversation to another worker when its worker is lost. Pure.

The edge sends the settings and the journal to the other worker, then the units that have no
outcome.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
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


class MoveCause(StrEnum):
    """Why a conversation leaves its worker."""

    # The connection to the worker failed, or the worker does not answer.
    WORKER_LOST = "worker_lost"
    MODEL_FAILED = "model_failed"
    SHUTDOWN = "shutdown"
    OTHER_MODEL = "other_model"  # the worker that was found for a move has another model


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


@dataclass(slots=True)
class Move:
    """One attempt to move.

    `began` is the time when the worker was lost. Further attempts keep this time, and
    `tried_worker_ids`: the workers that were left since then.
    """

    number: int  # attempts of the session so far, from 1
    cause: MoveCause
    began: Moment
    rebuilds: Iterator[session_pb2.ConverseRequest]  # messages that are not sent yet
    tried_worker_ids: list[str]


class Moves:
    """The moves of one conversation. `current` is the move in progress, or None."""

    def __init__(self, journal: Journal, requests: RequestQueue, seed: int) -> None:
        self.journal = journal
        self.current: Move | None = None
        self.on_given_up: Callable[[session_pb2.Failed], None] = lambda _: None
        self._requests = requests
        self._seed = seed
        self._number = 0
        self._lost_s: deque[float] = deque(maxlen=_MAX_MOVES)
        self._suspect: int | None = None
        requests.keeps_units = True

    def add_seed(self, settings: session_pb2.Open) -> None:
        """Set the seed if the client has not: all workers must draw the same random numbers."""
        if not settings.HasField("seed"):
            settings.seed = self._seed

    def begin(self, cause: MoveCause, now: Moment) -> bool:
        """Begin an attempt: the unanswered units wait for another worker.

        Returns False if the conversation cannot move. A worker with another model was not lost, so
        it does not count as one of the losses that are allowed.
        """
        is_lost = cause is not MoveCause.OTHER_MODEL
        if not self.journal.is_whole or (is_lost and not self.can_move(now)):
            return False
        if is_lost:
            self._lost_s.append(now.monotonic_s)
        self._number += 1
        began = self.current.began if self.current else now
        tried = self.current.tried_worker_ids if self.current else []
        self.current = Move(self._number, cause, began, iter(()), tried)
        return True

    def can_move(self, now: Moment) -> bool:
        """Return whether the conversation can move if its worker is lost now.

        It cannot if its journal was given up, or if it has lost too many workers lately.
        """
        is_recent = bool(self._lost_s) and now.monotonic_s - self._lost_s[0] < _WITHIN_S
        return self.journal.is_whole and not (is_recent and len(self._lost_s) == _MAX_MOVES)

    def take_back(self) -> session_pb2.Failed | None:
        """Take the unanswered units back from the lost worker.

        If the first of these units was also the first one at another worker that was lost, it may
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

    def claimed(self) -> None:
        """Open the conversation again, because the slot of another worker is claimed."""
        self._requests.opening = session_pb2.ConverseRequest(open=self.journal.opening)

    def opened(self, opened: session_pb2.Opened) -> bool:
        """Begin to rebuild. Return False if the worker has another model."""
        first = self.journal.opened
        is_same = opened.model_digest == first.model_digest
        if not (self.current and is_same and opened.prompt_token_count == first.prompt_token_count):
            return False
        self.current.rebuilds = self.journal.rebuilds()
        return True

    def rebuild(self) -> bool:
        """Send the next part of the journal.

        Return whether all parts were sent, so that units follow.
        """
        assert self.current
        self._requests.opening = next(self.current.rebuilds, None)
        if self._requests.opening is not None:
            return False
        self._requests.is_open = True
        self.current = None
        return True
