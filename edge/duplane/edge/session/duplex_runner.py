"""Runs a duplex session on a slot of a worker, and on a second slot during a move."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from duplane.edge.clock import Clock
from duplane.edge.metrics import EdgeMetrics, SessionMetrics
from duplane.edge.session.duplex_session import DuplexSession
from duplane.edge.session.effects import (
    Acquire,
    AnswerBegan,
    Cancel,
    CountSegment,
    CountUnheard,
    Effect,
    EndMove,
    Record,
    RecordAnswered,
    RecordDropped,
    RecordFailed,
    RecordFixed,
    RecordResumed,
    ReportUnreachable,
    RequestPermit,
    ReturnPermit,
    StopTurn,
    TakePlace,
    Use,
)
from duplane.edge.session.move_table import (
    LOST_PHASES,
    MOVING,
    QUIET,
    MoveCause,
    MoveOutcome,
    MovePhase,
)
from duplane.edge.session.returnable_runner import ReturnableRunner
from duplane.edge.session.slot import Slot
from duplane.edge.settings import Limits
from duplane.edge.spans import SessionSpans
from duplane.edge.transport.client import Client
from duplane.edge.transport.rate_limit import unit_rate
from duplane.fabric.client import FabricClient
from duplane.fabric.converse import ConverseStream
from duplane.fabric.durations import to_seconds
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.journal import LossReason
from duplane.fabric.model import DEFAULT_FORMAT, ModelFormat
from duplane.fabric.monitoring.spans import EDGE_OPEN
from duplane.fabric.queue_positions import never_growing
from duplane.fabric.v1 import lease_pb2

_log = logging.getLogger(__name__)
_LOSSES = {
    LossReason.SESSION_BOUND: "its journal exceeds --journal-bytes",
    LossReason.TOTAL_BOUND: "all journals together exceed --journal-total-bytes",
    LossReason.NO_COPY: "its past units did not come in time from the edge that had it before",
    LossReason.NO_STATE: "the worker does not report what a rebuild needs, or too much",
}
_CLAIM_S = 1  # seconds in which the claim of a slot must be answered while a session moves


@dataclass(slots=True, eq=False)
class _SlotCall:
    """The call for one slot: its task, and the stream to the worker once the slot is claimed."""

    task: asyncio.Task[None]
    stream: ConverseStream | None = None

    def cancel(self) -> None:
        """Give the slot back immediately, or stop to acquire it."""
        if self.stream:
            self.stream.cancel()
        if self.task is not asyncio.current_task():
            self.task.cancel()


class DuplexRunner(ReturnableRunner):
    """Runs one duplex session for one client.

    The units go to one slot. While the session moves, it prepares a second slot.
    """

    def __init__(
        self,
        session: DuplexSession,
        client: Client,
        limits: Limits,
        fabric: FabricClient,
        spans: SessionSpans,
        clock: Clock,
        metrics: EdgeMetrics,
    ) -> None:
        super().__init__(session, client, limits, fabric, spans, clock, metrics)
        self._units = SessionMetrics(metrics, session.identity.session_id)
        self._pace = unit_rate(limits.units_per_s, DEFAULT_FORMAT.unit_s)
        # None ends `_exchange`.
        self._attempts: asyncio.Queue[Acquire | TakePlace | None] = asyncio.Queue()
        self._tell_place = never_growing(self._on_queued)
        self._slot_calls: dict[Slot, _SlotCall] = {}

    async def _exchange(self, request: lease_pb2.AcquireLeaseRequest) -> None:
        slot = self.session.moves.present
        try:
            async with asyncio.TaskGroup() as tasks:
                if self.adoption is None:
                    self._add_slot_call(slot, tasks.create_task(self._hold_slot(slot, request)))
                elif stream := self.adoption.stream:
                    self._add_slot_call(slot, tasks.create_task(self._converse(slot, stream)))
                    self._slot_calls[slot].stream = stream
                while attempt := await self._attempts.get():
                    if isinstance(attempt, TakePlace):
                        if await self._left_queue(slot):
                            again = self._at_place(slot, request, attempt.queue_token)
                            self._add_slot_call(slot, tasks.create_task(again))
                    elif self.session.moves.is_next(attempt.slot):
                        moving = tasks.create_task(self._try_to_move(attempt, request))
                        self._add_slot_call(attempt.slot, moving)
        finally:
            self._units.end()

    async def _left_queue(self, slot: Slot) -> bool:
        """Stop to wait for the first slot. Return False if it has come already."""
        call = self._slot_calls.get(slot)
        if call is None or call.stream:
            return False
        call.cancel()
        await asyncio.wait({call.task})
        return call.stream is None and self.session.closed is None

    async def _at_place(
        self, slot: Slot, first: lease_pb2.AcquireLeaseRequest, queue_token: str
    ) -> None:
        request = lease_pb2.AcquireLeaseRequest()
        request.CopyFrom(first)
        request.request_id += "/place"
        request.queue_token = queue_token
        await self._hold_slot(slot, request)

    def _add_slot_call(self, slot: Slot, task: asyncio.Task[None]) -> None:
        self._slot_calls[slot] = _SlotCall(task)
        task.add_done_callback(lambda _: self._slot_calls.pop(slot))

    async def _try_to_move(self, attempt: Acquire, first: lease_pb2.AcquireLeaseRequest) -> None:
        """Acquire a slot of another worker, rebuild the conversation there, and continue there."""
        if attempt.cause is MoveCause.RETURNED:
            _log.info("the client is back, and the session acquires a slot again")
        elif attempt.is_lost:
            _log.warning("the session leaves worker %s: %s", self.worker, attempt.cause)
        else:
            _log.info("the session prepares to leave worker %s: %s", self.worker, attempt.cause)
        if attempt.pause_s:
            due_s = self._clock.now().monotonic_s + attempt.pause_s
            await self._wait_until(due_s, was_lost=attempt.is_lost)
        request = lease_pb2.AcquireLeaseRequest()
        request.CopyFrom(first)
        request.request_id += f"/move{attempt.number}"
        request.ticket_id, request.ticket_proof = attempt.ticket_id, attempt.ticket_proof
        request.was_granted = bool(attempt.ticket_id)
        model = self.session.moves.present.granted.model_label
        has_begun = self.session.moves.phase is not MovePhase.LOST_EARLY
        if model and (has_begun or model == first.model):  # no other model will do
            request.needs["model"] = model
            request.model = ""
        avoided = attempt.avoided_workers
        request.avoided_worker_ids.extend(avoided)
        request.avoided_worker_incarnations.extend(avoided.values())
        await self._hold_slot(attempt.slot, request)

    async def _hold_slot(self, slot: Slot, request: lease_pb2.AcquireLeaseRequest) -> None:
        """Exchange messages with one worker, until the session ends or leaves the worker."""
        try:
            on_granted = functools.partial(self._check_grant, slot)
            async with self._fabric.session(
                request, self._tell_place, self._spans.context, on_granted
            ) as stream:
                now = self._clock.now()
                open_s = to_seconds(stream.claimed.open_timeout)
                events = self.session.claimed(slot, stream.granted, open_s, now)
                self._slot_calls[slot].stream = stream
                self._apply(events, now)
                await self._converse(slot, stream)
        except FabricError as error:  # there is no slot, or it cannot be used
            self._slot_failed(slot, error)

    async def _converse(self, slot: Slot, stream: ConverseStream) -> None:
        """Exchange messages with the worker of a slot that the session uses."""
        async with asyncio.TaskGroup() as tasks:
            sending = tasks.create_task(self._send_requests(slot, stream))
            receiving = tasks.create_task(self._receive_responses(slot, stream))
            receiving.add_done_callback(lambda _: sending.cancel())

    # --- effects of the session ---

    def _execute(self, effect: Effect) -> None:
        self._wake.set()
        match effect:
            case Acquire() | TakePlace():
                self._attempt(effect)
            case Use(slot):
                self._use_slot(slot)
            case Cancel(slot):
                if self.session.closed is None:
                    self._spans.end_step()
                if call := self._slot_calls.get(slot):
                    self._leave(slot, call)
            case RequestPermit(permits, slot):
                self._spans.end_step()
                permits.request(slot, lambda: self._permitted(slot))
            case ReturnPermit(permits, slot):
                permits.give_back(slot)
            case RecordResumed() | RecordAnswered():
                self._record_resume(effect)
            case StopTurn() | CountSegment() | CountUnheard() | AnswerBegan():
                super()._execute(effect)  # a duplex session has no turns
            case _:
                self._record(effect)

    def _use_slot(self, slot: Slot) -> None:
        if self.adoption and slot in self._slot_calls:  # not one that the other edge gave back
            self.session.is_kept_elsewhere = False
            self.adoption.is_safe.set()
        self._note_claim(slot.granted)
        self._units.worker_id = self.worker
        self._use_model(ModelFormat.of(slot.granted.model))

    def _leave(self, slot: Slot, call: _SlotCall) -> None:
        """Give a slot back, by the end of its call.

        A worker that keeps a copy holds the slot of a call without a close. So the task that sends
        to it closes the call first (`_end_input`).
        """
        if slot.is_kept and call.stream:
            asyncio.get_running_loop().call_later(self._limits.end_s, call.cancel)
        else:
            call.cancel()

    def _record_resume(self, record: RecordResumed | RecordAnswered) -> None:
        """Report that the client is back, or that it has its first answer."""
        if isinstance(record, RecordAnswered):
            self._metrics.resume_times.observe(record.delay_s)
            return
        self._metrics.resumed(*record)
        _log.info("the client is back after %.2f s: %s", record.gap_s, record.outcome)

    def _attempt(self, attempt: Acquire | TakePlace) -> None:
        if isinstance(attempt, Acquire):
            self._spans.begin_move(attempt.cause, attempt.number)
        self._attempts.put_nowait(attempt)

    def _use_model(self, model: ModelFormat) -> None:
        """Limit and judge units by their duration."""
        self._units.use_model(model)
        self._spans.use_model(model)
        self._pace = unit_rate(self._limits.units_per_s, model.unit_s)

    def _permitted(self, slot: Slot) -> None:
        self.session.moves.permitted(slot)
        self._wake.set()

    def _record(self, record: Record) -> None:
        """Report a fact to the fabric, the metrics and the spans."""
        match record:
            case ReportUnreachable(granted):
                self._fabric.report_unreachable(granted)
            case EndMove():
                self._end_move(record)
            case RecordFailed(failed):
                now = self._clock.now()
                self._units.answered(failed, now)
                if self._spans.are_exported and (
                    written := self._spans.answered(failed, now.wall_ns)
                ):
                    written()
            case RecordFixed(loss):
                self._spans.fixed(loss.reason)
                _log.log(
                    logging.INFO if loss.reason is LossReason.NO_STATE else logging.WARNING,
                    "the session can no longer move, so it ends with worker %s: %s, after %d units "
                    "of %d bytes",
                    self.worker,
                    _LOSSES[loss.reason],
                    loss.unit_count,
                    loss.byte_count,
                )
            case RecordDropped(receipts):
                self._units.dropped(len(receipts))
                if self._spans.are_exported:
                    for receipt in receipts:
                        self._spans.dropped(receipt)

    def _end_move(self, end: EndMove) -> None:
        is_moved = end.outcome is MoveOutcome.MOVED
        self._units.moved(end, self._clock.now())
        self._spans.end_move(end)
        if is_moved:
            _log.info("the session continues at worker %s after %.2f s", self.worker, end.silent_s)
        elif self.session.closed is None and self.session.moves.phase not in LOST_PHASES:
            _log.info("the session stays at worker %s: %s", self.worker, _why_stayed(end))

    # --- workers that hang ---

    def overdue_slots(self, overdue_s: float) -> Sequence[Slot]:
        """Return the slots whose workers have owed an answer for longer than `overdue_s`."""
        return self.session.moves.overdue_slots(overdue_s, self._clock.now())

    def hedge(self, slot: Slot) -> None:
        """Prepare another worker while the worker of this slot may still answer."""
        if slot is self.session.moves.present:
            now = self._clock.now()
            self.session.overdue(now)
            self._apply([], now)

    def lose(self, slot: Slot) -> None:
        """Leave the worker of this slot, because the worker hangs."""
        self._slot_failed(slot, FabricError(Reason.UNAVAILABLE, "the worker hangs"))
        if call := self._slot_calls.get(slot):
            call.cancel()

    # --- the calls to the workers ---

    async def _send_requests(self, slot: Slot, stream: ConverseStream) -> None:
        """Send the session's requests to a worker; `_pace` limits the units per second."""
        session = self.session
        try:
            while session.closed is None and session.moves.uses(slot):
                self._wake.clear()
                now = self._clock.now()
                outgoing = session.take(now, slot)
                if outgoing is None:
                    await self._wake.wait()
                    continue
                if session.moves.is_next(slot):
                    self._apply([], now)  # the message may have a time limit
                request, receipt = outgoing
                kind = request.WhichOneof("message")
                wait_s = self._pace.spend(now.monotonic_s) if kind == "unit" else 0.0
                if kind == "open":
                    self._spans.begin(EDGE_OPEN)
                if receipt:
                    times = receipt.received_s, now.monotonic_s
                    self._units.sent.append((request.unit.sequence, *times))
                    if self._spans.are_exported:
                        self._spans.sending(request.unit, receipt)
                await stream.write(request)
                if kind == "unit" and self._spans.are_exported:
                    self._spans.sent(request.unit.sequence)
                if wait_s:
                    await self._wait_until(now.monotonic_s + wait_s)
            await self._end_input(slot, stream)
        except FabricError:
            return  # the receiving task gets and handles the error

    async def _end_input(self, slot: Slot, stream: ConverseStream) -> None:
        """End the input of a call. If the session continues elsewhere, cancel the call later."""
        if slot.is_kept:
            is_parked = self.session.moves.phase is MovePhase.PARKED
            await stream.close(keep_copy=is_parked or self.session.may_go_on_elsewhere)
        await stream.end_input()
        if self.session.closed is None:
            await asyncio.sleep(self._limits.end_s)
            stream.cancel()

    async def _wait_until(self, due_s: float, was_lost: bool = True) -> None:
        """Wait until the monotonic time `due_s`, or until the session ends.

        Unless `was_lost`, do not wait longer if the present worker is lost meanwhile.
        """
        session = self.session
        timer = self._clock.call_at(due_s, self._wake.set)
        try:
            while session.closed is None and self._clock.now().monotonic_s < due_s:
                if not was_lost and session.moves.phase in LOST_PHASES:
                    return
                self._wake.clear()
                await self._wake.wait()
        finally:
            timer.cancel()

    async def _receive_responses(self, slot: Slot, stream: ConverseStream) -> None:
        """Handle the responses of a worker, up to and including `closed`."""
        session = self.session
        moves = session.moves
        try:
            kind = ""
            while kind != "closed":
                response = await stream.read()
                now, kind = self._clock.now(), response.WhichOneof("message")
                if slot is not moves.present and not moves.is_next(slot):
                    continue  # the session has left the worker
                on_written = None
                if kind == "opened":
                    self._spans.end_step()
                events = session.responded(response, now, slot)
                if kind in ("delta", "failed"):
                    outcome = response.delta if kind == "delta" else response.failed
                    if self._spans.are_exported:
                        on_written = self._spans.answered(outcome, now.wall_ns)
                    self._units.answered(outcome, now)
                self._apply(events, now, on_written)
                if kind != "delta" or moves.phase not in QUIET or moves.queue.is_catching_up:
                    self._wake.set()  # now there may be something to send
        except FabricError as error:
            self._slot_failed(slot, error)

    def _slot_failed(self, slot: Slot, error: FabricError) -> None:
        """Handle the failure of the request for a slot, or of the call to its worker."""
        session = self.session
        if not session.moves.uses(slot):
            return
        self._metrics.stream_failed(error.reason)
        _log.debug("a call failed: %s", error.reason)
        now = self._clock.now()
        self._apply(session.failed(error, now, slot), now)
        self._wake.set()

    def _check_grant(self, slot: Slot, granted: lease_pb2.Granted) -> None:
        """Refuse a granted slot that the session cannot use. Raises FabricError."""
        moves = self.session.moves
        if moves.phase in MOVING:
            # A worker that does not answer must not delay the client for long.
            granted.claim_timeout.FromSeconds(_CLAIM_S)
        try:
            moves.check_grant(slot, granted)
        except FabricError as error:  # the session does not wait until the slot is given back
            self._slot_failed(slot, error)
            raise
        self._on_granted(granted)

    async def _stop_exchange(self, exchanging: asyncio.Task[None]) -> None:
        """Leave the queue immediately. The worker gets a bounded time to close an open stream."""
        self._attempts.put_nowait(None)
        if self.session.returned:  # nothing was sent to the worker
            for call in list(self._slot_calls.values()):
                call.cancel()
        elif any(call.stream for call in self._slot_calls.values()):
            await asyncio.wait({exchanging}, timeout=self._limits.end_s)
        exchanging.cancel()


def _why_stayed(end: EndMove) -> str:
    if end.outcome is MoveOutcome.FAILED:
        return "the preparation failed"
    is_drain = end.cause is MoveCause.DRAIN
    return "its drain was taken back" if is_drain else "it has answered"
