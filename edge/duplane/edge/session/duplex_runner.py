"""Runs a duplex session on a slot of a worker, and on a second slot during a move."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from duplane.edge.clock import Clock
from duplane.edge.metrics import EdgeMetrics, SessionMetrics
from duplane.edge.session.continuity import Continuity, Turns
from duplane.edge.session.duplex_session import DuplexSession
from duplane.edge.session.journal import Journal
from duplane.edge.session.moving import Move, MoveCause, MoveOutcome, Moves, cause_of
from duplane.edge.session.runner import SessionRunner
from duplane.edge.settings import Limits
from duplane.edge.spans import SessionSpans
from duplane.edge.transport.client import Client
from duplane.edge.transport.rate_limit import unit_rate
from duplane.fabric.client import FabricClient
from duplane.fabric.converse import ConverseStream
from duplane.fabric.durations import to_seconds
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.model import DEFAULT_FORMAT
from duplane.fabric.monitoring.spans import EDGE_OPEN
from duplane.fabric.v1 import lease_pb2, session_pb2

_log = logging.getLogger(__name__)
_CLAIM_S = 1  # seconds in which the claim of a slot must be answered while a session moves
_ANSWERED = frozenset({"open", "unit"})  # messages that a worker answers
# Seconds until a session tries again if it has tried all workers that have a free slot. While its
# own worker still answers, this time doubles with each attempt, up to _MAX_DOUBLINGS times.
_RETRY_S = 0.25
_MAX_DOUBLINGS = 5


@dataclass(slots=True, eq=False)
class HeldSlot:
    """A slot of the session, with the stream to its worker.

    `owed_s` is the monotonic time since which the worker owes an answer; None if it owes none.
    """

    stream: ConverseStream
    owed_s: float | None = None


class DuplexRunner(SessionRunner[DuplexSession]):
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
        continuity: Continuity | None = None,
    ) -> None:
        """Prepare a session. Without `continuity`, the session ends when its worker is lost."""
        super().__init__(session, client, limits, fabric, spans, clock, metrics)
        self._units = SessionMetrics(metrics, session)
        self._pace = unit_rate(limits.units_per_s, DEFAULT_FORMAT.unit_s)
        self._request = lease_pb2.AcquireLeaseRequest()  # the request for the first slot
        self._granted = lease_pb2.Granted()  # the grant of the last slot that got units
        self._slot: HeldSlot | None = None  # the slot that gets the units
        self._next: HeldSlot | None = None  # the slot that is prepared
        self._move: Move | None = None
        self._attempt: asyncio.Task[None] | None = None  # the task of `_move`
        self._calls = asyncio.TaskGroup()
        self._context = contextvars.copy_context()  # of the tasks in `_calls`
        self._turns = continuity.turns if continuity else Turns(0)
        if continuity:
            journal = Journal(continuity.journals)
            session.moves = Moves(journal, session.requests, secrets.randbits(63))
            session.moves.on_given_up = self._gave_up
        if spans.are_exported:
            session.requests.on_dropped = spans.dropped

    async def _call(self, request: lease_pb2.AcquireLeaseRequest) -> None:
        self._request = request
        try:
            async with self._calls as calls:
                calls.create_task(self._hold_slot(request))
        finally:
            self._follow_move()
            self._units.end()

    async def _hold_slot(
        self, request: lease_pb2.AcquireLeaseRequest, move: Move | None = None
    ) -> None:
        """Exchange messages with one worker, until the session ends or leaves the worker.

        With `move`, the session uses the slot only after the conversation is rebuilt there.
        """
        try:
            async with self._fabric.session(
                request, self._on_queued, self._spans.context, self._on_granted
            ) as stream:
                slot = HeldSlot(stream)
                if move is None:
                    self._use(slot)
                    now, open_s = self._clock.now(), to_seconds(stream.claimed.open_timeout)
                    self._apply(self.session.granted(open_s, now), now)
                else:
                    await self._prepare(slot, move)
                if self._slot is slot:
                    await self._converse(slot)
        except FabricError as error:  # there is no slot, or its call has failed before its use
            if move is None:
                self._failed(error)
            elif self.session.move is move:
                self._next_failed(error)

    async def _converse(self, slot: HeldSlot) -> None:
        """Exchange units and deltas with the worker of the slot that the session uses."""
        async with asyncio.TaskGroup() as tasks:
            sending = tasks.create_task(self._send_requests(slot))
            receiving = tasks.create_task(self._receive_responses(slot))
            receiving.add_done_callback(lambda _: sending.cancel())

    def _use(self, slot: HeldSlot) -> None:
        """Send the units to this slot from now on. The call of the former slot ends."""
        self._slot, self._granted = slot, slot.stream.granted
        self._note_claim(self._granted)

    # --- moves ---

    async def _try_to_move(self, move: Move) -> None:
        """Acquire a slot of another worker, rebuild the conversation there, and continue there."""
        level = logging.WARNING if move.is_lost else logging.INFO
        _log.log(level, "the session leaves worker %s: %s", self.worker, move.cause)
        tried = move.tried_worker_ids
        if not tried:
            tried.append(self._granted.worker_id)
        if (excess := move.attempt - len(tried)) > 0:
            doublings = 0 if move.is_lost else min(excess - 1, _MAX_DOUBLINGS)
            due_s = self._clock.now().monotonic_s + _RETRY_S * 2**doublings
            await self._wait_until(due_s, move)
        request = lease_pb2.AcquireLeaseRequest()
        request.CopyFrom(self._request)
        request.request_id += f"/move{move.number}"
        # With its old ticket the session waits ahead of newer tickets.
        request.ticket_id = self._granted.ticket_id
        request.avoided_worker_ids.extend(tried)
        await self._hold_slot(request, move)

    async def _prepare(self, slot: HeldSlot, move: Move) -> None:
        """Rebuild the conversation at the next worker, and use its slot when that is done."""
        stream, worker_id = slot.stream, slot.stream.granted.worker_id
        if self._slot and worker_id == self._granted.worker_id:
            self._next_failed(FabricError(Reason.UNAVAILABLE, "no other worker has a free slot"))
            return
        if worker_id not in move.tried_worker_ids:
            move.tried_worker_ids.append(worker_id)
        self._next = slot
        self._spans.end_step()
        self._turns.enter(move, self._wake.set)
        try:
            while self.session.move is move:
                self._wake.clear()
                now = self._clock.now()
                request = self.session.next_request(now)
                if request is None:
                    await self._wake.wait()
                    continue
                if request.HasField("open"):
                    self._spans.begin(EDGE_OPEN)
                slot.owed_s = now.monotonic_s
                await stream.write(request)
                await self._read_answer(slot, move)
        except FabricError as error:
            if self.session.move is move:
                self._lose_next(error, slot)
        finally:
            self._turns.leave(move)
            self._next = None

    async def _read_answer(self, slot: HeldSlot, move: Move) -> None:
        """Read from the next worker, up to its answer to the message that was sent last."""
        while slot.owed_s is not None and self.session.move is move:
            response = await slot.stream.read()
            now, kind = self._clock.now(), response.WhichOneof("message")
            if kind != "leaving":
                slot.owed_s = None
            if kind == "opened":
                self._spans.end_step()
            former = self._slot
            events = self.session.next_responded(response, now)
            if move.outcome is MoveOutcome.MOVED:
                self._use(slot)
                if former and move.cause is MoveCause.OVERDUE:
                    former.stream.cancel()
            self._apply(events, now)
            self._follow_move()
            self._wake.set()

    def _follow_move(self) -> None:
        """If `session.move` has changed, report the former move and start the new one."""
        former, self._move = self._move, self.session.move
        if former is self._move:
            return
        if former:
            self._report_end(former)
            if former.outcome is not MoveOutcome.MOVED:
                self._cancel_attempt()
        if move := self._move:
            self._spans.begin_move(move.cause, move.number)
            self._attempt = self._calls.create_task(self._try_to_move(move), context=self._context)

    def _on_timer(self) -> None:
        super()._on_timer()
        self._follow_move()  # the time of the attempt may be over

    def _report_end(self, move: Move) -> None:
        is_moved = move.outcome is MoveOutcome.MOVED
        since = move.silent_since
        silent_s = self._clock.now().monotonic_s - since.monotonic_s if since else 0.0
        self._metrics.moved(move.cause, move.outcome, silent_s)
        self._spans.end_move(is_moved=is_moved, is_error=move.outcome is MoveOutcome.FAILED)
        if is_moved:
            _log.info("the session continues at worker %s after %.2f s", self.worker, silent_s)

    def _cancel_attempt(self) -> None:
        """Give the prepared slot back immediately, by cancelling the call to its worker."""
        if self.session.closed is None:
            self._spans.end_step()
        if self._next:
            self._next.stream.cancel()
        if self._attempt and self._attempt is not asyncio.current_task():
            self._attempt.cancel()

    def _lose_next(self, error: FabricError, slot: HeldSlot) -> None:
        """Leave the next worker, because the call to it has failed."""
        if cause_of(error) is MoveCause.WORKER_LOST:
            self._fabric.report_unreachable(slot.stream.granted)
        self._next_failed(error)

    def _next_failed(self, error: FabricError) -> None:
        self._metrics.stream_failed(error.reason)
        now = self._clock.now()
        self._apply(self.session.next_failed(error, now), now)
        self._follow_move()

    def _on_granted(self, granted: lease_pb2.Granted) -> None:
        if self.session.move:  # a worker that does not answer must not delay the client for long
            granted.claim_timeout.FromSeconds(_CLAIM_S)
        super()._on_granted(granted)

    def _gave_up(self, failed: session_pb2.Failed) -> None:
        """Record that a unit has failed, since two workers were lost while they had it."""
        now = self._clock.now()
        self._units.answered(failed, now)
        if self._spans.are_exported and (written := self._spans.answered(failed, now.wall_ns)):
            written()

    # --- workers that hang ---

    def overdue_slots(self, overdue_s: float) -> Sequence[HeldSlot]:
        """Return the slots whose workers have owed an answer for longer than `overdue_s`.

        If the session cannot move to another worker, the result is empty: the session waits for
        its worker.
        """
        now = self._clock.now()
        slots = [
            slot
            for slot in (self._slot, self._next)
            if slot and slot.owed_s is not None and now.monotonic_s - slot.owed_s > overdue_s
        ]
        return slots if slots and self.session.can_move(now) else ()

    def hedge(self, slot: HeldSlot) -> None:
        """Prepare another worker while the worker of this slot may still answer."""
        if slot is self._slot and not self.session.closed:
            self.session.overdue(self._clock.now())
            self._follow_move()
            self._wake.set()

    def lose(self, slot: HeldSlot) -> None:
        """Leave the worker of this slot, because the worker hangs."""
        if self.session.closed:
            return
        error = FabricError(Reason.UNAVAILABLE, "the worker hangs")
        if slot is self._slot:
            self._lose_slot(error, slot)
        elif slot is self._next:
            self._lose_next(error, slot)
        slot.stream.cancel()

    # --- the slot that gets the units ---

    async def _send_requests(self, slot: HeldSlot) -> None:
        """Send the session's requests to the worker; `_pace` limits the units per second."""
        stream, requests = slot.stream, self.session.requests
        try:
            while self.session.closed is None and self._slot is slot:
                self._wake.clear()
                request = requests.take()
                if request is None:
                    await self._wake.wait()
                    continue
                kind, now_s = request.WhichOneof("message"), self._clock.now().monotonic_s
                wait_s = self._pace.spend(now_s) if kind == "unit" else 0.0
                if slot.owed_s is None and kind in _ANSWERED:
                    slot.owed_s = now_s
                if kind == "open":
                    self._spans.begin(EDGE_OPEN)
                if receipt := requests.taken_receipt:
                    self._units.sent.append((request.unit.sequence, receipt.received_s))
                    if self._spans.are_exported:
                        self._spans.sending(request.unit, receipt)
                await stream.write(request)
                if kind == "unit" and self._spans.are_exported:
                    self._spans.sent(request.unit.sequence)
                if wait_s:
                    await self._wait_until(now_s + wait_s)
            await self._end_input(stream)
        except FabricError:
            return  # the receiving task gets and handles the error

    async def _end_input(self, stream: ConverseStream) -> None:
        """End the input of a call. If the session continues elsewhere, cancel the call later."""
        await stream.end_input()
        if self.session.closed is None:
            await asyncio.sleep(self._limits.end_s)
            stream.cancel()

    async def _wait_until(self, due_s: float, move: Move | None = None) -> None:
        """Wait until the monotonic time `due_s`, or until the session ends.

        With `move`, do not wait longer if the present worker is lost meanwhile.
        """
        was_lost = move is not None and move.is_lost
        timer = self._clock.call_at(due_s, self._wake.set)
        try:
            while self.session.closed is None and self._clock.now().monotonic_s < due_s:
                if move and move.is_lost and not was_lost:
                    return
                self._wake.clear()
                await self._wake.wait()
        finally:
            timer.cancel()

    async def _receive_responses(self, slot: HeldSlot) -> None:
        """Handle the worker's responses, up to and including `closed`."""
        try:
            is_over = False
            while not is_over:
                response = await slot.stream.read()
                now, kind = self._clock.now(), response.WhichOneof("message")
                is_over = kind == "closed"
                if self._slot is not slot:
                    continue  # the session has left the worker
                events, on_written = self.session.responded(response, now), None
                is_owing = self.session.requests.oldest_sent is not None
                slot.owed_s = now.monotonic_s if is_owing else None
                if kind in ("delta", "failed"):
                    outcome = response.delta if kind == "delta" else response.failed
                    if self._spans.are_exported:
                        on_written = self._spans.answered(outcome, now.wall_ns)
                    self._units.answered(outcome, now)
                self._apply(events, now, on_written)
                if kind == "opened":
                    self._spans.end_step()
                if kind != "delta" or self._move or self.session.requests.is_catching_up:
                    self._wake.set()  # now there may be something to send
                    if is_over:
                        self._leave(slot)
                    self._follow_move()
        except FabricError as error:
            if self._slot is slot:
                self._lose_slot(error, slot)

    def _lose_slot(self, error: FabricError, slot: HeldSlot) -> None:
        """Leave the worker that gets the units, because the call to it has failed."""
        self._failed(error)
        self._leave(slot)
        self._follow_move()
        self._wake.set()

    def _leave(self, slot: HeldSlot) -> None:
        self._slot = None
        if (move := self.session.move) and move.cause is MoveCause.WORKER_LOST:
            self._fabric.report_unreachable(slot.stream.granted)

    async def _stop_call(self, calling: asyncio.Task[None]) -> None:
        """Leave the queue immediately. The worker gets a bounded time to close an open stream."""
        self._follow_move()
        if self._slot or self._next:
            await asyncio.wait({calling}, timeout=self._limits.end_s)
        calling.cancel()
