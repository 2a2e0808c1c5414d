"""What a session asks its runner to do, beside sending events to the client.

A session appends its effects to `Session.effects`; the runner executes them in this order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from duplane.edge.session.continuity import RebuildPermits
from duplane.edge.session.move_table import MoveCause, MoveOutcome
from duplane.edge.session.receipt import Receipt
from duplane.edge.session.slot import Slot
from duplane.fabric.journal import JournalLoss
from duplane.fabric.v1 import lease_pb2, session_pb2


class Acquire(NamedTuple):
    """Begin an attempt to move: acquire `slot` at a worker that is not in `avoided_workers`.

    Wait `pause_s` before; but if `is_lost` is False and the present worker is lost meanwhile, wait
    no longer. With the old `ticket_id` the session waits ahead of newer tickets.
    """

    slot: Slot
    number: int  # of the attempt, from 1
    cause: MoveCause
    is_lost: bool  # the present worker is lost
    pause_s: float
    ticket_id: str
    ticket_proof: bytes
    avoided_workers: Mapping[str, str]  # id -> incarnation


class TakePlace(NamedTuple):
    """Wait for the first slot at the place in the queue that the client had at another edge."""

    queue_token: str


class Use(NamedTuple):
    """From now on, the units go to this slot."""

    slot: Slot


class Cancel(NamedTuple):
    """Give this slot back immediately, or stop to acquire it."""

    slot: Slot


class StopTurn(NamedTuple):
    """End the call to the worker for the running turn, or stop to acquire a slot for it."""


class RequestPermit(NamedTuple):
    """Request a permit to rebuild the conversation in this slot."""

    permits: RebuildPermits
    slot: Slot


class ReturnPermit(NamedTuple):
    """Return the permit of this slot, or withdraw the request for it."""

    permits: RebuildPermits
    slot: Slot


class ReportUnreachable(NamedTuple):
    """Report that the worker of this grant is lost."""

    granted: lease_pb2.Granted


class EndMove(NamedTuple):
    """Record the end of an attempt to move. No worker got units for `silent_s`.

    The ids of the workers are empty if they are not known. The rebuild lasts from the settings
    until the next worker has rebuilt the last past units, or until the attempt fails.
    """

    cause: MoveCause
    outcome: MoveOutcome
    silent_s: float
    rebuild_s: float = 0.0
    from_worker_id: str = ""
    to_worker_id: str = ""


class RecordFailed(NamedTuple):
    """Record a unit that failed because it was given up."""

    failed: session_pb2.Failed


class RecordFixed(NamedTuple):
    """Record that the session can no longer move, because its journal was given up."""

    loss: JournalLoss


class RecordDropped(NamedTuple):
    """Record units that were dropped before they were sent."""

    receipts: Sequence[Receipt]


class CountSegment(NamedTuple):
    """Count a piece of speech of a half duplex session."""

    is_too_short: bool


class CountUnheard(NamedTuple):
    """Count a chunk of sound that a half duplex session has not heard."""


class AnswerBegan(NamedTuple):
    """Record that the first part of an answer came `delay_s` after the end of the speech."""

    delay_s: float


class RecordResumed(NamedTuple):
    """Record that a client is back after `gap_s`, and has missed events of `unit_count` units."""

    outcome: str
    gap_s: float
    unit_count: int


class RecordAnswered(NamedTuple):
    """Record that a client that is back got the first new event after `delay_s`."""

    delay_s: float


Spoken = CountSegment | CountUnheard | AnswerBegan
Record = ReportUnreachable | EndMove | RecordFailed | RecordFixed | RecordDropped
Effect = (
    Acquire
    | Use
    | Cancel
    | StopTurn
    | RequestPermit
    | ReturnPermit
    | Record
    | Spoken
    | RecordResumed
    | RecordAnswered
    | TakePlace
)
