"""Runs a duplex session: one slot and one stream to the worker, from the grant to the end."""

from __future__ import annotations

import asyncio
import logging
import secrets

from duplane.edge.clock import Clock
from duplane.edge.metrics import EdgeMetrics, SessionMetrics
from duplane.edge.session.duplex_session import DuplexSession
from duplane.edge.session.journal import Journal, JournalSpace
from duplane.edge.session.moving import Move, MoveCause, Moves
from duplane.edge.session.runner import SessionRunner
from duplane.edge.settings import Limits
from duplane.edge.spans import SessionSpans
from duplane.edge.transport.client import Client
from duplane.edge.transport.rate_limit import unit_rate
from duplane.fabric.client import FabricClient
from duplane.fabric.converse import ConverseStream
from duplane.fabric.durations import to_seconds
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.monitoring.spans import EDGE_OPEN
from duplane.fabric.v1 import lease_pb2, session_pb2

_log = logging.getLogger(__name__)
_CLAIM_S = 1  # seconds in which the claim of a slot must be answered while a session moves
_ANSWERED = frozenset({"open", "rebuild", "unit"})  # messages that a worker answers
_RETRY_S = 0.25  # seconds before a session returns to a worker that it has left in the same move


class DuplexRunner(SessionRunner[DuplexSession]):
    """Runs one duplex session for one client."""

    def __init__(
        self,
        session: DuplexSession,
        client: Client,
        limits: Limits,
        fabric: FabricClient,
        spans: SessionSpans,
        clock: Clock,
        metrics: EdgeMetrics,
        journals: JournalSpace | None = None,
    ) -> None:
        """Prepare a session. Without `journals`, the session ends when its worker is lost."""
        super().__init__(session, client, limits, fabric, spans, clock, metrics)
        self._units = SessionMetrics(metrics)
        self._pace = unit_rate(limits.units_per_s)
        self._granted = lease_pb2.Granted()  # the grant of the last slot that was claimed
        self._move: Move | None = None
        self._stream: ConverseStream | None = None
        # The monotonic time since which the present worker has to answer; None if nothing is open.
        self._owed_s: float | None = None
        if journals:
            session.moves = Moves(Journal(journals), session.requests, secrets.randbits(63))
            session.moves.on_given_up = self._gave_up
        if spans.are_exported:
            session.requests.on_dropped = spans.dropped

    async def _call(self, request: lease_pb2.AcquireLeaseRequest) -> None:
        try:
            await self._hold_slot(request)
            while (move := self.session.move) and self.session.closed is None:
                next_request = lease_pb2.AcquireLeaseRequest()
                next_request.CopyFrom(request)
                next_request.request_id += f"/move{move.number}"
                # With its old ticket the session waits ahead of newer tickets.
                next_request.ticket_id = self._granted.ticket_id
                if self._granted.worker_id in move.tried_worker_ids:
                    await asyncio.sleep(_RETRY_S)  # no other worker has a free slot
                else:
                    move.tried_worker_ids.append(self._granted.worker_id)
                next_request.avoided_worker_ids.extend(move.tried_worker_ids)
                await self._hold_slot(next_request)
        finally:
            self._has_moved()
            self._units.end(self.session.requests.total_dropped_count)

    async def _hold_slot(self, request: lease_pb2.AcquireLeaseRequest) -> None:
        """Exchange messages with one worker, until the session ends or leaves the worker."""
        before = self.session.move
        try:
            async with self._fabric.session(
                request, self._on_queued, self._spans.context, self._on_granted
            ) as stream:
                self._stream, self._granted, self._owed_s = stream, stream.granted, None
                self._note_claim(stream.granted)
                now, open_s = self._clock.now(), to_seconds(stream.claimed.open_timeout)
                self._apply(self.session.granted(open_s, now), now)
                async with asyncio.TaskGroup() as tasks:
                    sending = tasks.create_task(self._send_requests(stream))
                    receiving = tasks.create_task(self._receive_responses(stream))
                    receiving.add_done_callback(lambda _: sending.cancel())
                move = self.session.move
                if move and move is not before and move.cause is MoveCause.WORKER_LOST:
                    self._fabric.report_unreachable(stream.granted)
        except FabricError as error:
            self._failed(error)
            self._has_moved()
        finally:
            self._stream = None

    def _on_granted(self, granted: lease_pb2.Granted) -> None:
        if self.session.move:  # a worker that does not answer must not delay the client for long
            granted.claim_timeout.FromSeconds(_CLAIM_S)
        super()._on_granted(granted)

    @property
    def waited_s(self) -> float:
        """The seconds for which the session has waited for an answer of the present worker.

        Each answer restarts this time. 0 if no answer is due, or if the session cannot move to
        another worker.
        """
        now = self._clock.now()
        if self._stream is None or self._owed_s is None or not self.session.can_move(now):
            return 0.0
        return now.monotonic_s - self._owed_s

    def lose_worker(self) -> None:
        """Leave the worker, because it hangs."""
        if self._stream and not self.session.closed:
            self._failed(FabricError(Reason.UNAVAILABLE, "the worker hangs"))
            self._has_moved()
            self._owed_s = None
            self._stream.cancel()

    def _gave_up(self, failed: session_pb2.Failed) -> None:
        """Record that a unit has failed, since two workers were lost while they had it."""
        now = self._clock.now()
        self._units.answered(failed, self.session.requests.total_dropped_count, now)
        if self._spans.are_exported and (written := self._spans.answered(failed, now.wall_ns)):
            written()

    def _has_moved(self) -> bool:
        """Report the beginning or the end of a move. Return whether a move has begun."""
        former, self._move = self._move, self.session.move
        is_over = former is not None and (self._move is not former or bool(self.session.closed))
        if former and is_over:
            is_moved = not (self._move or self.session.closed)
            gap_s = self._clock.now().monotonic_s - former.began.monotonic_s
            self._metrics.moved(former.cause, gap_s, is_moved=is_moved)
            self._spans.end_move(is_moved=is_moved)
            if is_moved:
                _log.info("the session continues at worker %s after %.2f s", self.worker, gap_s)
        has_begun = self._move is not None and self._move is not former
        if self._move and has_begun:
            self._spans.begin_move(self._move.cause, self._move.number)
            _log.warning("the session leaves worker %s: %s", self.worker, self._move.cause)
        return has_begun

    async def _send_requests(self, stream: ConverseStream) -> None:
        """Send the session's requests to the worker; `_pace` limits the units per second."""
        requests = self.session.requests
        try:
            while self.session.closed is None:
                self._wake.clear()
                request = requests.take()
                if request is None:
                    await self._wake.wait()
                    continue
                kind, now_s = request.WhichOneof("message"), self._clock.now().monotonic_s
                wait_s = self._pace.spend(now_s) if kind == "unit" else 0.0
                if self._owed_s is None and kind in _ANSWERED:
                    self._owed_s = now_s
                if kind == "open":
                    self._spans.begin(EDGE_OPEN)
                if receipt := requests.taken_receipt:
                    self._units.sent.append((request.unit.sequence, receipt.received_ns / 1e9))
                    if self._spans.are_exported:
                        self._spans.sending(request.unit, receipt)
                await stream.write(request)
                if kind == "unit" and self._spans.are_exported:
                    self._spans.sent(request.unit.sequence)
                if wait_s:
                    await self._wait_until(now_s + wait_s)
            await stream.end_input()
        except FabricError:
            return  # the receiving task gets and handles the error

    async def _wait_until(self, due_s: float) -> None:
        """Wait until the monotonic time `due_s`, or until the session ends."""
        timer = self._clock.call_at(due_s, self._wake.set)
        try:
            while self.session.closed is None and self._clock.now().monotonic_s < due_s:
                self._wake.clear()
                await self._wake.wait()
        finally:
            timer.cancel()

    async def _receive_responses(self, stream: ConverseStream) -> None:
        """Handle the worker's responses, up to and including `closed`."""
        try:
            is_over = False
            while not is_over:
                response = await stream.read()
                now, kind = self._clock.now(), response.WhichOneof("message")
                events, on_written = self.session.responded(response, now), None
                is_owing = self.session.requests.oldest_sent is not None
                self._owed_s = now.monotonic_s if is_owing else None
                if kind in ("delta", "failed"):
                    outcome = response.delta if kind == "delta" else response.failed
                    if self._spans.are_exported:
                        on_written = self._spans.answered(outcome, now.wall_ns)
                    self._units.answered(outcome, self.session.requests.total_dropped_count, now)
                self._apply(events, now, on_written)
                if kind == "opened":
                    self._spans.end_step()
                if kind != "delta" or self.session.requests.is_catching_up:
                    self._wake.set()  # now there may be something to send
                    is_over = self._has_moved() or kind == "closed"
        except FabricError as error:
            self._failed(error)
            self._has_moved()

    async def _stop_call(self, calling: asyncio.Task[None]) -> None:
        """Leave the queue immediately. The worker gets a bounded time to close an open stream."""
        if self._stream:
            if self._move:  # the worker has not rebuilt the conversation: expect no last message
                self._stream.cancel()
            await asyncio.wait({calling}, timeout=self._limits.end_s)
        calling.cancel()
