"""The gRPC SessionService of one worker: checks claims, runs calls, cleans slots after them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import statistics
import time
from collections.abc import AsyncIterator, Coroutine, Generator, Mapping
from functools import partial
from typing import Any, TypeVar

import grpc
import grpc.aio
from opentelemetry.trace import Span, StatusCode
from opentelemetry.util.types import AttributeValue

from duplane.fabric.durations import to_duration
from duplane.fabric.errors import FabricError, Reason, abort
from duplane.fabric.monitoring import spans
from duplane.fabric.monitoring.logs import logged_ids
from duplane.fabric.monitoring.spans import Telemetry
from duplane.fabric.tls.peers import peer_holder
from duplane.fabric.v1 import lease_pb2, registry_pb2, session_pb2, session_pb2_grpc, trace_pb2
from duplane.worker.admission import Admission, slot_reports
from duplane.worker.engine.engine import AnyEngine
from duplane.worker.engine.slot_channel import Channel
from duplane.worker.metrics import WorkerMetrics
from duplane.worker.session.call import CallEnd
from duplane.worker.session.call_state import CallStateMachine
from duplane.worker.session.chat_call import ChatCall
from duplane.worker.session.chat_reporter import ChatReporter
from duplane.worker.session.copies import Copies
from duplane.worker.session.duplex_call import Attached, DuplexCall, SlotListener
from duplane.worker.session.first_messages import FirstMessages, require_same
from duplane.worker.session.kept_calls import KeptCalls, RunningCall
from duplane.worker.session.unit_reporter import UnitReporter
from duplane.worker.session.unit_spans import UnitSpans
from duplane.worker.settings import WorkerSettings
from duplane.worker.video.decoding import Videos

_log = logging.getLogger(__name__)

SERVICE = session_pb2.DESCRIPTOR.services_by_name["SessionService"].full_name
_READ_REQUEST_S = 30.0  # in which the request of a chat, or for a copy, must arrive
# Reasons why a call ends that are faults of the worker.
Request = TypeVar("Request", session_pb2.ChatRequest, session_pb2.TakeOverRequest)
_FAULTS = (Reason.ENGINE_FAILED, Reason.UNKNOWN)


class SessionServicer(session_pb2_grpc.SessionServiceServicer):
    """Serves Converse and Chat on the slots of `admission`.

    The cleanup of a slot runs as one of `tasks`, after its call has ended. The rpc methods read and
    write through the context. gRPC allows this, although the generated stubs do not declare it.
    """

    def __init__(
        self,
        admission: Admission,
        engine: AnyEngine,
        tracer: Telemetry,
        settings: WorkerSettings,
        tasks: asyncio.TaskGroup,
        metrics: WorkerMetrics,
        copies: Copies,
    ) -> None:
        self._admission = admission
        self._engine = engine
        self._tracer = tracer
        self._limits = settings.limits
        self._recheck_interval_s = settings.recheck_interval_s
        self._videos = Videos(settings.limits, may_be_unconfined=settings.video_unconfined)
        self._tasks = tasks
        self._rechecks: set[asyncio.Task[None]] = set()
        self._calls: dict[int, DuplexCall | ChatCall] = {}
        # For each slot, the span of its call and the attributes of this span.
        self._spans: dict[int, tuple[Span, Mapping[str, AttributeValue]]] = {}
        self._metrics = metrics
        self._kept = KeptCalls(copies, metrics, self._end)
        self._first_messages = FirstMessages(admission)
        engine.on_launches = metrics.launches

    async def Converse(  # noqa: N802  # pyright: ignore[reportIncompatibleMethodOverride] - named and shaped by gRPC
        self,
        request_iterator: AsyncIterator[session_pb2.ConverseRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """Run one duplex session; see the contract."""
        del request_iterator  # the stream is read through the context
        await _guarded(context, self._converse(context))

    async def TakeOver(  # noqa: N802  # pyright: ignore[reportIncompatibleMethodOverride] - as Converse
        self,
        request_iterator: AsyncIterator[session_pb2.TakeOverRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """Send the copy of a session whose slot is free again; see the contract."""
        del request_iterator  # the stream is read through the context
        await _guarded(context, self._take_over(context))

    async def Chat(  # noqa: N802  # pyright: ignore[reportIncompatibleMethodOverride] - named and shaped by gRPC
        self,
        request_iterator: AsyncIterator[session_pb2.ChatRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """Run one turn of chat; see the contract. `add_to` registers it as a method that reads."""
        del request_iterator  # the request is read through the context, after its lease is checked
        await _guarded(context, self._chat(context))

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the methods.

        gRPC would read the request of Chat before it calls the method. As a method that reads a
        stream, Chat reads its only request itself; clients do not see a difference.
        """
        methods = {
            "Converse": grpc.stream_stream_rpc_method_handler(
                self.Converse,
                session_pb2.ConverseRequest.FromString,
                session_pb2.ConverseResponse.SerializeToString,
            ),
            "TakeOver": grpc.stream_stream_rpc_method_handler(
                self.TakeOver,
                session_pb2.TakeOverRequest.FromString,
                session_pb2.TakeOverResponse.SerializeToString,
            ),
            "Chat": grpc.stream_stream_rpc_method_handler(
                self.Chat,
                session_pb2.ChatRequest.FromString,
                session_pb2.ChatResponse.SerializeToString,
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))

    def end(self, slot: int, reason: session_pb2.CloseReason) -> None:
        """Close the call that holds a slot, if there is one.

        An edge that loses this worker gives the lease back, and may not know that another edge has
        taken the session since. Such a session goes on; it has its own time limits without an edge.
        """
        if call := self._calls.get(slot):
            if isinstance(call, DuplexCall):
                is_revoked = reason == session_pb2.CLOSE_REASON_REVOKED
                if is_revoked and call.is_adopted:
                    _log.info("slot %d: the session goes on at another edge", slot)
                    return
                call.keeps_copy = is_revoked  # the client may return
            call.close(reason)

    def drain(self, remaining_s: float | None = None) -> None:
        """Refuse new calls. Tell the clients of running calls to continue on another worker.

        If `remaining_s` is given, the worker ends the calls after this time, and then its process.
        """
        if remaining_s is None:
            self._admission.drain()
        else:
            self._admission.end()
        if unmovable := [slot.session_id for slot in self._admission.slots if slot.cannot_move]:
            end = "" if remaining_s is None else f", at most {remaining_s:g} s"
            _log.warning(
                "these sessions cannot move to another worker; the drain waits for their ends%s: "
                "%s",
                end,
                ", ".join(unmovable),
            )
        leaving = session_pb2.Leaving(reason=session_pb2.LEAVING_REASON_DRAIN)
        if remaining_s is not None:
            leaving.remaining_time.CopyFrom(to_duration(remaining_s))
        self._leave(leaving)

    def undrain(self) -> None:
        """Accept calls again, and tell the clients of running calls, unless the process ends."""
        self._admission.undrain()
        if self._admission.is_ending:
            return
        for call in tuple(self._calls.values()):
            if isinstance(call, DuplexCall):
                call.stay()

    def set_stuck(self, is_stuck: bool) -> None:
        """Refuse new calls while the device does not answer. Tell the clients of running calls."""
        self._admission.set_stuck(is_stuck)
        if is_stuck:
            self._leave(session_pb2.Leaving(reason=session_pb2.LEAVING_REASON_STUCK_DEVICE))

    def _leave(self, leaving: session_pb2.Leaving) -> None:
        for call in tuple(self._calls.values()):
            if isinstance(call, DuplexCall):
                call.leave(leaving)

    def stop(self) -> None:
        """Refuse new calls, close the running ones, and begin their cleanups without waiting."""
        self._admission.end()
        self._kept.stop()
        for call in tuple(self._calls.values()):
            call.close(session_pb2.CLOSE_REASON_SHUTDOWN)
            self._release(call)
        for recheck in self._rechecks:
            recheck.cancel()

    def fail(self) -> None:
        """Close all calls because the device has failed."""
        for call in tuple(self._calls.values()):
            call.close(session_pb2.CLOSE_REASON_ENGINE_FAILED)

    def report(self) -> registry_pb2.Report:
        """Return the state of the worker for a scheduler."""
        report = registry_pb2.Report(
            slots=slot_reports(self._admission),
            is_draining=self._admission.is_draining,
            memory_used_bytes=self._engine.memory_used_bytes,
            unit_count=self._metrics.unit_count,
        )
        if latest_s := self._metrics.latest_unit_times_s:
            report.unit_time.CopyFrom(to_duration(statistics.median(latest_s)))
        return report

    async def _converse(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        state = CallStateMachine(self._limits, time.monotonic())
        async with self._first_messages.reading(context) as checked:
            first = await _read_first(context, state)
        if first.HasField("attach"):
            running, attached = self._kept.attach(context, first.attach)
            if self._admission.is_draining:
                reason = session_pb2.LEAVING_REASON_DRAIN
                running.call.leave(session_pb2.Leaving(reason=reason))
            await self._serve(running, context, attached)
            return
        with self._counting_refusals():
            claim = first.claim
            require_same(checked, claim.lease, "claim.lease")
            caller = peer_holder(context)
            claims = self._admission.claim(claim.lease, time.monotonic(), caller=caller)
        client_trace = _client_trace(claim.trace, context)
        span = self._tracer.start(
            spans.WORKER_SESSION, parent=client_trace, attributes=_attributes(claims)
        )
        trace = client_trace if client_trace.traceparent else spans.inject(span)
        unit_spans = UnitSpans(
            claims, self._tracer, trace, spans.inject(span), self._engine.constants.unit_s
        )
        reporter = UnitReporter(unit_spans, self._metrics, self._admission)

        def on_pause(is_paused: bool) -> None:
            self._admission.set_paused(claims.slot, claims.lease_id, is_paused)

        def on_fixed() -> None:
            is_new = self._admission.set_cannot_move(claims.slot, claims.lease_id)
            if is_new and self._admission.is_draining:
                _log.warning("the drain waits for a session that can no longer move")

        call = DuplexCall(
            context,
            state,
            claims,
            self._engine,
            reporter,
            self._limits,
            SlotListener(on_pause, on_fixed),
            self._kept.copies,
        )
        running = RunningCall(call, claims, span, unit_spans.ended)
        with logged_ids(claims.session_id, trace):
            self._begin(call, claims, span)
            self._kept.began(running)
            await self._serve(running, context)

    async def _take_over(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        async with self._first_messages.reading(context):
            first = await _read_request(context, session_pb2.TakeOverRequest)
        with contextlib.suppress(grpc.aio.BaseError):  # the caller wants another copy, or is gone
            await self._kept.take_over(context, first.attach)

    async def _chat(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        with self._counting_refusals():
            async with self._first_messages.reading(context, is_chat=True) as checked:
                request = await _read_request(context, session_pb2.ChatRequest)
            require_same(checked, request.lease, "lease")
            claims = self._admission.claim(
                request.lease, time.monotonic(), is_chat=True, caller=peer_holder(context)
            )
        trace = _client_trace(request.trace, context)
        span = self._tracer.start(spans.WORKER_CHAT, parent=trace, attributes=_attributes(claims))
        reporter = ChatReporter(self._tracer, span, self._metrics)
        call = ChatCall(
            context, claims.slot, request, self._engine, reporter, self._limits, self._videos
        )
        with logged_ids(claims.session_id, trace):
            self._begin(call, claims, span)
            try:
                with self._reporting_faults(claims, span):
                    await call.run(partial(self._on_end, call, claims, span))
            finally:
                self._release(call)
                span.end()

    @contextlib.contextmanager
    def _counting_refusals(self) -> Generator[None]:
        try:
            yield
        except FabricError as error:
            self._metrics.refused(error.reason)
            raise

    def _begin(
        self, call: DuplexCall | ChatCall, claims: lease_pb2.LeaseClaims, span: Span
    ) -> None:
        self._calls[claims.slot] = call
        self._spans[claims.slot] = (span, _attributes(claims))
        _log.info("slot %d: session %s begins", claims.slot, _session_name(claims))

    async def _serve(
        self,
        running: RunningCall,
        stream: grpc.aio.ServicerContext[Any, Any],
        attached: Attached | None = None,
    ) -> None:
        """Serve a call on one stream. A call with a copy may outlive the stream.

        A client that has `attached` gets the session first.
        """
        call, claims, span = running.call, running.claims, running.span
        try:
            connection = None
            if attached:
                connection = attached.connection
                await call.send_session(attached, self._kept.pace)
            with self._reporting_faults(claims, span):
                await call.run(partial(self._on_end, call, claims, span), connection)
        finally:
            if call.abandon(stream):
                self._kept.broken(running)
            else:
                self._over(running)

    def _end(self, running: RunningCall, end: CallEnd) -> None:
        """End a call that has no stream."""
        self._on_end(running.call, running.claims, running.span, end)
        self._over(running)

    def _over(self, running: RunningCall) -> None:
        self._release(running.call)
        running.span.end()
        running.on_over()

    @contextlib.contextmanager
    def _reporting_faults(self, claims: lease_pb2.LeaseClaims, span: Span) -> Generator[None]:
        try:
            yield
        except FabricError:
            raise
        except Exception as error:
            self._report_end(claims, span, Reason.UNKNOWN, repr(error))
            raise

    def _on_end(
        self,
        call: DuplexCall | ChatCall,
        claims: lease_pb2.LeaseClaims,
        span: Span,
        end: CallEnd,
    ) -> None:
        if isinstance(end, FabricError):
            self._report_end(claims, span, end.reason, end.message)
        else:
            reason = session_pb2.CloseReason.Name(end.reason).removeprefix("CLOSE_REASON_")
            self._report_end(claims, span, reason, end.message)
        self._release(call)

    def _report_end(
        self, claims: lease_pb2.LeaseClaims, span: Span, reason: str, message: str
    ) -> None:
        """Log and count the end of a session. If the worker is at fault, log it as an error."""
        is_fault = reason in _FAULTS
        if is_fault:
            span.set_attribute(spans.ERROR_TYPE, reason)
            span.set_status(StatusCode.ERROR)
        self._metrics.ended(claims.kind, reason)
        _log.log(
            logging.ERROR if is_fault else logging.INFO,
            "worker %s slot %d: session %s ended: %s %s",
            claims.worker_id,
            claims.slot,
            _session_name(claims),
            reason,
            message,
        )

    def _release(self, call: DuplexCall | ChatCall) -> None:
        """Begin the cleanup of a call's slot, unless it has begun already."""
        slot = call.channel.slot
        if self._calls.get(slot) is call:
            del self._calls[slot]
            if isinstance(call, DuplexCall):
                self._kept.ended(call)
            self._admission.begin_cleanup(slot)
            self._tasks.create_task(
                self._clean(call.channel, *self._spans.pop(slot)), name=f"clean slot {slot}"
            )

    async def _clean(
        self, channel: Channel, span: Span, attributes: Mapping[str, AttributeValue]
    ) -> None:
        cleanup = self._tracer.start(
            spans.WORKER_CLEANUP, parent=spans.inject(span), attributes=attributes
        )
        is_clean = await self._engine.close(channel)
        cleanup.end()
        self._admission.finish_cleanup(channel.slot, is_clean=is_clean)
        if is_clean:
            _log.info("slot %d: free", channel.slot)
            return
        _log.error("slot %d: broken; it is checked again", channel.slot)
        recheck = self._tasks.create_task(self._recheck(channel.slot))
        self._rechecks.add(recheck)
        recheck.add_done_callback(self._rechecks.discard)

    async def _recheck(self, slot: int) -> None:
        """Repeat the cleanup of a broken slot until it succeeds."""
        while True:
            await asyncio.sleep(self._recheck_interval_s)
            if await self._engine.close_again(slot):
                self._admission.repair(slot)
                _log.warning("slot %d: free again", slot)
                return


async def _guarded(
    context: grpc.aio.ServicerContext[Any, Any], serving: Coroutine[Any, Any, None]
) -> None:
    """Run a call and translate its exceptions to gRPC statuses."""
    try:
        await serving
    except FabricError as error:
        failure = error
    except grpc.aio.BaseError:
        raise  # gRPC ends a call by this exception
    except Exception:  # noqa: BLE001 - the root of a call; the client gets no internals
        _log.exception("a session failed")
        failure = FabricError(Reason.UNKNOWN, "the worker failed; its log says why")
    else:
        return
    await abort(context, failure)


def _attributes(claims: lease_pb2.LeaseClaims) -> dict[str, AttributeValue]:
    return {
        spans.SESSION_ID: claims.session_id,
        spans.LEASE_ID: claims.lease_id,
        spans.SLOT: claims.slot,
    }


def _client_trace(
    trace: trace_pb2.TraceContext, context: grpc.aio.ServicerContext[Any, Any]
) -> trace_pb2.TraceContext:
    """Return `trace` unless it is empty, else the trace context in the call's metadata."""
    metadata = context.invocation_metadata() or ()
    return trace if trace.traceparent else spans.from_metadata(metadata)


def _session_name(claims: lease_pb2.LeaseClaims) -> str:
    return claims.session_id or claims.lease_id


async def _read_first(
    context: grpc.aio.ServicerContext[Any, Any], state: CallStateMachine
) -> session_pb2.ConverseRequest:
    try:
        async with asyncio.timeout(state.left_s(time.monotonic())):
            request = await context.read()
    except TimeoutError:
        state.expire()
        raise
    if not isinstance(request, session_pb2.ConverseRequest):
        raise FabricError(Reason.OUT_OF_ORDER, "the call ended without a claim")
    state.receive(request, time.monotonic())
    return request


async def _read_request(
    context: grpc.aio.ServicerContext[Any, Any], kind: type[Request]
) -> Request:
    try:
        async with asyncio.timeout(_READ_REQUEST_S):
            request = await context.read()
    except TimeoutError:
        raise FabricError(Reason.OPEN_TIMEOUT, "the request did not arrive in time") from None
    if not isinstance(request, kind):
        raise FabricError(Reason.OUT_OF_ORDER, "the call ended without a request")
    return request
