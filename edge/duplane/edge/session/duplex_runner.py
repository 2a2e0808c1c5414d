"""Runs a duplex session: one slot and one stream to the worker, from the grant to the end."""

from __future__ import annotations

import asyncio

from duplane.edge.clock import Clock
from duplane.edge.metrics import EdgeMetrics, SessionMetrics
from duplane.edge.session.duplex_session import DuplexSession
from duplane.edge.session.runner import SessionRunner
from duplane.edge.settings import Limits
from duplane.edge.spans import SessionSpans
from duplane.edge.transport.client import Client
from duplane.edge.transport.rate_limit import unit_rate
from duplane.fabric.client import FabricClient
from duplane.fabric.converse import ConverseStream
from duplane.fabric.durations import to_seconds
from duplane.fabric.errors import FabricError
from duplane.fabric.monitoring.spans import EDGE_OPEN
from duplane.fabric.v1 import lease_pb2


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
    ) -> None:
        super().__init__(session, client, limits, fabric, spans, clock, metrics)
        self._units = SessionMetrics(metrics)
        self._pace = unit_rate(limits.units_per_s)
        self._has_stream = False
        if spans.are_exported:
            session.requests.on_dropped = spans.dropped

    async def _call(self, request: lease_pb2.AcquireLeaseRequest) -> None:
        try:
            async with self._fabric.session(
                request, self._on_queued, self._spans.context, self._on_granted
            ) as stream:
                self._has_stream = True
                self._note_claim(stream.granted)
                now, open_s = self._clock.now(), to_seconds(stream.claimed.open_timeout)
                self._apply(self.session.granted(open_s, now), now)
                async with asyncio.TaskGroup() as tasks:
                    sending = tasks.create_task(self._send_requests(stream))
                    receiving = tasks.create_task(self._receive_responses(stream))
                    receiving.add_done_callback(lambda _: sending.cancel())
        except FabricError as error:
            self._failed(error)
        finally:
            self._units.end(self.session.requests.total_dropped_count)

    async def _send_requests(self, stream: ConverseStream) -> None:
        """Send the session's requests to the worker. The limits bound the units per second."""
        try:
            while self.session.closed is None:
                self._wake.clear()
                request = self.session.requests.take()
                if request is None:
                    await self._wake.wait()
                    continue
                kind, now_s, wait_s = request.WhichOneof("message"), 0.0, 0.0
                is_traced = kind == "unit" and self._spans.are_exported
                if kind == "unit":
                    now_s = self._clock.now().monotonic_s
                    wait_s = self._pace.spend(now_s)
                    receipt = self.session.requests.last_receipt
                    self._units.sent.append((request.unit.sequence, receipt.received_ns / 1e9))
                    if is_traced:
                        self._spans.sending(request.unit, receipt)
                elif kind == "open":
                    self._spans.begin(EDGE_OPEN)
                await stream.write(request)
                if is_traced:
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
                if kind in ("delta", "failed"):
                    outcome = response.delta if kind == "delta" else response.failed
                    if self._spans.are_exported:
                        on_written = self._spans.answered(outcome, now.wall_ns)
                    self._units.answered(outcome, self.session.requests.total_dropped_count, now)
                self._apply(events, now, on_written)
                if kind == "opened":
                    self._spans.end_step()
                    self._wake.set()  # now units can be sent
                is_over = kind == "closed"
        except FabricError as error:
            self._failed(error)

    async def _stop_call(self, calling: asyncio.Task[None]) -> None:
        """Leave the queue at once. The worker gets a bounded time to close an open stream."""
        if self._has_stream:
            await asyncio.wait({calling}, timeout=self._limits.end_s)
        calling.cancel()
