"""The table of moves: the phases of a conversation that leaves its worker, and the events.

The *present* worker gets the units. The *next* worker is another one, to which the session moves.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from enum import Enum, StrEnum, auto

from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.v1 import session_pb2


class MoveCause(StrEnum):
    """Why a conversation leaves its worker."""

    # The connection to the worker failed, or the worker does not answer.
    WORKER_LOST = "worker_lost"
    MODEL_FAILED = "model_failed"
    SHUTDOWN = "shutdown"
    OTHER_MODEL = "other_model"  # the worker that was found for a move has another model
    DRAIN = "drain"  # the worker will end its sessions, and still answers
    OVERDUE = "overdue"  # the worker owes an answer for too long; the answer may still come
    RETURNED = "returned"  # the client is back after its session has given its slot back


class MoveOutcome(StrEnum):
    """How an attempt to move has ended."""

    MOVED = "moved"
    FAILED = "failed"
    # The worker has answered, or its drain was taken back, before another one was ready.
    STAYED = "stayed"


_FAILED_CALLS: Mapping[Reason, MoveCause] = {
    Reason.UNAVAILABLE: MoveCause.WORKER_LOST,
    Reason.DRAINING: MoveCause.SHUTDOWN,
    Reason.ENGINE_FAILED: MoveCause.MODEL_FAILED,
}
_CLOSED: Mapping[int, MoveCause] = {
    session_pb2.CLOSE_REASON_UNSPECIFIED: MoveCause.WORKER_LOST,
    # The lease became void before the worker read its claim: the worker did not run for a while.
    session_pb2.CLOSE_REASON_REVOKED: MoveCause.WORKER_LOST,
    session_pb2.CLOSE_REASON_SHUTDOWN: MoveCause.SHUTDOWN,
    session_pb2.CLOSE_REASON_ENGINE_FAILED: MoveCause.MODEL_FAILED,
}


def cause_of(end: FabricError | session_pb2.Closed) -> MoveCause | None:
    """Return why a conversation moves after the end of its call; None if the session ends."""
    if isinstance(end, session_pb2.Closed):
        return _CLOSED.get(end.reason)
    # A foreign error was made by gRPC itself, which has several codes for a broken connection.
    return MoveCause.WORKER_LOST if end.is_foreign else _FAILED_CALLS.get(end.reason)


class MovePhase(Enum):
    """What a conversation does to leave its worker."""

    __hash__ = object.__hash__  # each unit is looked up in several sets; that of Enum is slow

    START = auto()  # the settings are not sent to the first worker yet
    OPENING = auto()  # the first worker opens the conversation
    SETTLED = auto()  # the conversation is at one worker
    FIXED = auto()  # the same, but without a journal: the session ends with its worker
    # The present worker still answers.
    ACQUIRING = auto()  # the session acquires a slot of another worker
    WAITING = auto()  # the session has a slot of the next worker, and waits for a permit
    STARTING = auto()  # the next worker opens the conversation
    CATCHING_UP = auto()  # the next worker rebuilds past units while new units are answered
    HOLDING = auto()  # units wait until the present worker has answered those that it has
    CHANGING = auto()  # the next worker rebuilds the last past units; units wait
    OVERTAKING = auto()  # the next worker rebuilds the last past units; the present one gets units
    # The present worker is lost; units wait.
    LOST_EARLY = auto()  # no worker has opened the conversation; the session acquires another slot
    LOST_ACQUIRING = auto()
    LOST_STARTING = auto()
    LOST_CATCHING_UP = auto()
    LOST_CHANGING = auto()
    PARKED = auto()  # the client is away, and the session has given its slot back
    CLOSED = auto()  # the session has ended


class MoveEvent(Enum):
    """What changes the phase."""

    OPEN_SENT = auto()  # the settings are sent to the first worker
    OPENED = auto()  # the first worker has opened the conversation
    GIVEN_UP = auto()  # the journal is given up, or there is none
    DRAINS = auto()  # the present worker drains
    UNDRAINED = auto()  # the drain of the present worker was taken back, so the session stays
    LATE = auto()  # the present worker owes an answer for too long, or its device is stuck
    LOST = auto()  # the present worker is lost
    ANSWERED = auto()  # the present worker has answered in time, so the session stays
    CLAIMED = auto()  # a slot of the next worker is claimed
    PERMITTED = auto()  # the session may rebuild its conversation
    NEXT_OPENED = auto()  # the next worker has opened the conversation
    HELD = auto()  # only few past units are left, so units wait from now on
    LAST_SENT = auto()  # the last past units are sent to the next worker
    REBUILT = auto()  # the next worker has rebuilt the last past units: now it is the present one
    NEXT_LOST = auto()  # the next worker cannot be used, or no slot can be had
    EXPIRED = auto()  # the next worker does not rebuild the last past units in time
    PARKED = auto()  # the client is away for too long, so the session gives its slot back
    RETURNED = auto()  # the client is back
    CLOSED = auto()  # the session has ended


# The first worker has not opened the conversation yet.
EARLY = frozenset({MovePhase.START, MovePhase.OPENING})
# The present worker still answers, and another one is prepared.
PREPARING = frozenset(
    {
        MovePhase.ACQUIRING,
        MovePhase.WAITING,
        MovePhase.STARTING,
        MovePhase.CATCHING_UP,
        MovePhase.HOLDING,
        MovePhase.CHANGING,
        MovePhase.OVERTAKING,
    }
)
LOST_PHASES = frozenset(
    {
        MovePhase.LOST_EARLY,
        MovePhase.LOST_ACQUIRING,
        MovePhase.LOST_STARTING,
        MovePhase.LOST_CATCHING_UP,
        MovePhase.LOST_CHANGING,
    }
)
MOVING = PREPARING | LOST_PHASES
# No worker answers units.
SILENT = LOST_PHASES | {MovePhase.PARKED}
MOVABLE = MOVING | {MovePhase.SETTLED}
# The session can give its slot back, and be rebuilt later.
PARKABLE = MOVABLE - {MovePhase.LOST_EARLY}
# The next worker has a slot for the session.
CLAIMED_PHASES = MOVING - {MovePhase.ACQUIRING, MovePhase.LOST_ACQUIRING, MovePhase.LOST_EARLY}
# The next worker has the last past units. While the present worker answers, `--failover-s` limits
# the time in these phases.
LAST_SENT_PHASES = frozenset({MovePhase.CHANGING, MovePhase.OVERTAKING, MovePhase.LOST_CHANGING})
HELD_PHASES = frozenset({MovePhase.HOLDING, MovePhase.CHANGING})
# The present worker gets units.
FLOWING = (PREPARING - HELD_PHASES) | {MovePhase.SETTLED, MovePhase.FIXED}

# No move is in progress, and units are exchanged.
QUIET = frozenset({MovePhase.SETTLED, MovePhase.FIXED})


def _rows(
    phases: Set[MovePhase], event: MoveEvent, next_phase: MovePhase | None
) -> Mapping[tuple[MovePhase, MoveEvent], MovePhase]:
    """Return the rows of one event in several phases; None as next phase changes nothing."""
    return {(phase, event): next_phase or phase for phase in MovePhase if phase in phases}


# Phase and event -> next phase. Every other pair is a fault of the program.
TRANSITIONS: Mapping[tuple[MovePhase, MoveEvent], MovePhase] = {
    (MovePhase.START, MoveEvent.OPEN_SENT): MovePhase.OPENING,
    (MovePhase.OPENING, MoveEvent.OPENED): MovePhase.SETTLED,
    (MovePhase.SETTLED, MoveEvent.DRAINS): MovePhase.ACQUIRING,
    (MovePhase.SETTLED, MoveEvent.LATE): MovePhase.ACQUIRING,
    (MovePhase.ACQUIRING, MoveEvent.CLAIMED): MovePhase.WAITING,
    (MovePhase.WAITING, MoveEvent.PERMITTED): MovePhase.STARTING,
    (MovePhase.STARTING, MoveEvent.NEXT_OPENED): MovePhase.CATCHING_UP,
    (MovePhase.CATCHING_UP, MoveEvent.HELD): MovePhase.HOLDING,
    (MovePhase.HOLDING, MoveEvent.LAST_SENT): MovePhase.CHANGING,
    (MovePhase.CATCHING_UP, MoveEvent.LAST_SENT): MovePhase.OVERTAKING,
    **_rows(EARLY, MoveEvent.LOST, MovePhase.LOST_EARLY),
    (MovePhase.SETTLED, MoveEvent.LOST): MovePhase.LOST_ACQUIRING,
    (MovePhase.ACQUIRING, MoveEvent.LOST): MovePhase.LOST_ACQUIRING,
    (MovePhase.WAITING, MoveEvent.LOST): MovePhase.LOST_STARTING,
    (MovePhase.STARTING, MoveEvent.LOST): MovePhase.LOST_STARTING,
    (MovePhase.CATCHING_UP, MoveEvent.LOST): MovePhase.LOST_CATCHING_UP,
    (MovePhase.HOLDING, MoveEvent.LOST): MovePhase.LOST_CATCHING_UP,
    (MovePhase.CHANGING, MoveEvent.LOST): MovePhase.LOST_CHANGING,
    (MovePhase.OVERTAKING, MoveEvent.LOST): MovePhase.LOST_CHANGING,
    (MovePhase.LOST_EARLY, MoveEvent.CLAIMED): MovePhase.START,
    (MovePhase.LOST_EARLY, MoveEvent.NEXT_LOST): MovePhase.LOST_EARLY,
    (MovePhase.LOST_ACQUIRING, MoveEvent.CLAIMED): MovePhase.LOST_STARTING,
    (MovePhase.LOST_STARTING, MoveEvent.NEXT_OPENED): MovePhase.LOST_CATCHING_UP,
    (MovePhase.LOST_CATCHING_UP, MoveEvent.LAST_SENT): MovePhase.LOST_CHANGING,
    **_rows(LAST_SENT_PHASES, MoveEvent.REBUILT, MovePhase.SETTLED),
    **_rows(PREPARING, MoveEvent.UNDRAINED, MovePhase.SETTLED),
    **_rows(PREPARING, MoveEvent.ANSWERED, MovePhase.SETTLED),
    **_rows(PREPARING, MoveEvent.NEXT_LOST, MovePhase.SETTLED),
    **_rows(LAST_SENT_PHASES - LOST_PHASES, MoveEvent.EXPIRED, MovePhase.SETTLED),
    **_rows(LOST_PHASES - {MovePhase.LOST_EARLY}, MoveEvent.NEXT_LOST, MovePhase.LOST_ACQUIRING),
    # A session whose worker is lost does not wait for its permit; the permit may come later.
    **_rows(LOST_PHASES & CLAIMED_PHASES, MoveEvent.PERMITTED, None),
    **_rows(PREPARING | {MovePhase.SETTLED}, MoveEvent.GIVEN_UP, MovePhase.FIXED),
    **_rows(PARKABLE, MoveEvent.PARKED, MovePhase.PARKED),
    (MovePhase.PARKED, MoveEvent.RETURNED): MovePhase.LOST_ACQUIRING,
    **_rows(set(MovePhase) - {MovePhase.CLOSED}, MoveEvent.CLOSED, MovePhase.CLOSED),
}


class IllegalEventError(Exception):
    """An event was not possible in the phase of the conversation: a fault of the program."""

    def __init__(self, phase: MovePhase, event: MoveEvent) -> None:
        super().__init__(f"{event.name} in phase {phase.name}")


def after(phase: MovePhase, event: MoveEvent) -> MovePhase:
    """Return the phase after an event. Raises IllegalEventError."""
    found = TRANSITIONS.get((phase, event))
    if found is None:
        raise IllegalEventError(phase, event)
    return found
