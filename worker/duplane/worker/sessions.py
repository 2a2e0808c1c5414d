"""The SessionService of one worker: claims, the sessions that run, and what follows each.

Translates between gRPC and the parts that decide; decides nothing itself.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
import time
from collections import deque
from collections.abc import AsyncIterator, Coroutine
from datetime import UTC, datetime
from typing import Any

import grpc.aio
from opentelemetry.util.types import AttributeValue

from duplane.fabric import telemetry
from duplane.fabric.errors import FabricError, Reason, abort
from duplane.fabric.telemetry import Telemetry
from duplane.fabric.v1 import lease_pb2, registry_pb2, session_pb2, session_pb2_grpc
from duplane.worker.admission import Admission
from duplane.worker.chat_session import ChatSession
from duplane.worker.deltas import Account
from duplane.worker.engine import Conversation, Engine
from duplane.worker.phases import Phases
from duplane.worker.session import Session
from duplane.worker.settings import SessionLimits
from duplane.worker.videos import Videos

_log = logging.getLogger(__name__)

_UNIT_TIMES_KEPT = 128


class Sessions(session_pb2_grpc.SessionServiceServicer):
    """Serves Converse and Chat on the slots of `admission`.

    Cleanups run in `tasks`, past their calls. Method names are the contract's; the stubs know
    only methods that yield, gRPC also these, which read and write through the context.
    """

    def __init__(
        self,
        admission: Admission,
        engine: Engine,
        tracer: Telemetry,
        limits: SessionLimits,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._admission = admission
        self._engine = engine
        self._tracer = tracer
        self._limits = limits
        self._videos = Videos(limits)
        self._tasks = tasks
        self._running: dict[int, Session | ChatSession] = {}
        self._unit_count = 0
        self._unit_times_s: deque[float] = deque(maxlen=_UNIT_TIMES_KEPT)

    async def Converse(  # noqa: N802  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        request_iterator: AsyncIterator[session_pb2.ConverseRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """Run one session; see the contract."""
        del request_iterator  # the stream is read through the context
        await _guarded(context, self._converse(context))

    async def Chat(  # noqa: N802  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        request: session_pb2.ChatRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """Run one turn of chat; see the contract."""
        await _guarded(context, self._chat(request, context))

    def end(self, slot: int, reason: session_pb2.CloseReason) -> None:
        """Close the session that holds a slot, if one does."""
        if session := self._running.get(slot):
            session.end(session_pb2.Closed(reason=reason))

    def stop(self) -> None:
        """Take no more sessions, close those that run and begin their cleanups, now."""
        self._admission.drain()
        for session in tuple(self._running.values()):
            session.end(session_pb2.Closed(reason=session_pb2.CLOSE_REASON_SHUTDOWN))
            self._release(session)

    def report(self) -> registry_pb2.Report:
        """Say how the worker is, for a scheduler."""
        report = registry_pb2.Report(
            slots=slot_reports(self._admission),
            is_draining=self._admission.is_draining,
            memory_used_bytes=self._engine.memory_used_bytes,
            unit_count=self._unit_count,
        )
        if self._unit_times_s:
            median_s = statistics.median(self._unit_times_s)
            report.unit_time.FromNanoseconds(round(median_s * 1e9))
        return report

    async def _converse(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        phases = Phases(self._limits, time.monotonic())
        claim = await _read_claim(context, phases)
        claims = self._admission.claim(claim.lease, datetime.now(UTC))
        span = self._tracer.start(
            telemetry.WORKER_SESSION,
            parent=claim.trace,
            attributes=_attributes(claims),
        )
        trace = claim.trace if claim.trace.traceparent else telemetry.inject(span)
        account = Account(claims, self._tracer, trace)
        session = Session(
            context,
            phases,
            claims,
            self._engine,
            account,
            self._limits,
            self._count_unit,
        )
        self._running[claims.slot] = session
        _log.info("slot %d: session %s", claims.slot, claims.session_id or claims.lease_id)

        try:
            await session.run(lambda: self._release(session))
        finally:
            self._release(session)
            span.end()

    async def _chat(
        self, request: session_pb2.ChatRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        claims = self._admission.claim(request.lease, datetime.now(UTC), is_chat=True)
        span = self._tracer.start(
            telemetry.WORKER_CHAT, parent=request.trace, attributes=_attributes(claims)
        )
        session = ChatSession(context, claims.slot, self._engine, self._limits, self._videos, span)
        self._running[claims.slot] = session
        _log.info("slot %d: chat %s", claims.slot, claims.session_id or claims.lease_id)
        try:
            await session.run(request, lambda: self._release(session))
        finally:
            self._release(session)
            span.end()

    def _release(self, session: Session | ChatSession) -> None:
        """Begin the cleanup of a session's slot, once."""
        slot = session.conversation.slot
        if self._running.get(slot) is session:
            del self._running[slot]
            self._admission.begin_cleanup(slot)
            self._tasks.create_task(self._clean(session.conversation), name=f"clean slot {slot}")

    async def _clean(self, conversation: Conversation) -> None:
        is_clean = await self._engine.close(conversation)
        self._admission.finish_cleanup(conversation.slot, is_clean=is_clean)
        _log.info("slot %d: %s", conversation.slot, "free" if is_clean else "broken")

    def _count_unit(self, seconds: float) -> None:
        self._unit_count += 1
        self._unit_times_s.append(seconds)


async def _guarded(
    context: grpc.aio.ServicerContext[Any, Any], serving: Coroutine[Any, Any, None]
) -> None:
    """Run a call and translate what it raises."""
    try:
        await serving
    except FabricError as error:
        failure = error
    except grpc.aio.BaseError:
        raise  # gRPC's own way to leave a call
    except Exception:  # noqa: BLE001 - a task root; the client learns no internals
        _log.exception("a session failed")
        failure = FabricError(Reason.UNKNOWN, "the worker failed; its log says why")
    else:
        return
    await abort(context, failure)


def _attributes(claims: lease_pb2.LeaseClaims) -> dict[str, AttributeValue]:
    return {
        telemetry.SESSION_ID: claims.session_id,
        telemetry.LEASE_ID: claims.lease_id,
        telemetry.SLOT: claims.slot,
    }


async def _read_claim(
    context: grpc.aio.ServicerContext[Any, Any], phases: Phases
) -> session_pb2.Claim:
    try:
        async with asyncio.timeout_at(phases.deadline_s):
            request = await context.read()
    except TimeoutError:
        phases.expire()
        raise
    if not isinstance(request, session_pb2.ConverseRequest):
        raise FabricError(Reason.OUT_OF_ORDER, "the call ended without a claim")
    phases.receive(request, time.monotonic())
    return request.claim


def slot_reports(admission: Admission) -> list[registry_pb2.SlotReport]:
    """Return every slot, in order, as the contract puts it."""
    return [
        registry_pb2.SlotReport(
            slot=slot.index,
            state=slot.state.value,
            fencing_number=slot.fencing_number,
            lease_id=slot.lease_id,
            session_id=slot.session_id,
            kind=slot.kind,
        )
        for slot in admission.slots
    ]
