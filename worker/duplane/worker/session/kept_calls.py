"""The calls of sessions with a copy: they outlive their streams, and other edges attach to them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc.aio
from opentelemetry.trace import Span

from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.journal import LossReason
from duplane.fabric.tls.identity import Role
from duplane.fabric.tls.peers import peer_identity
from duplane.fabric.v1 import lease_pb2, session_pb2
from duplane.worker.metrics import AttachOutcome, WorkerMetrics
from duplane.worker.session.call import CallEnd
from duplane.worker.session.copies import Copies, SessionCopy, attach_responses, superseded
from duplane.worker.session.copy_pace import CopyPace
from duplane.worker.session.duplex_call import Attached, DuplexCall

_log = logging.getLogger(__name__)
_Context = grpc.aio.ServicerContext[Any, Any]

_OUTCOMES = {
    Reason.UNKNOWN_SESSION: AttachOutcome.UNKNOWN,
    Reason.SLOT_OCCUPIED: AttachOutcome.UNKNOWN,
    Reason.NOT_READY: AttachOutcome.NOT_READY,
    Reason.COPY_STALE: AttachOutcome.STALE,
    Reason.SUPERSEDED: AttachOutcome.SUPERSEDED,
}


@dataclass(frozen=True, eq=False)
class RunningCall:
    """A call that holds a slot, with its span. `on_over` is called after its end."""

    call: DuplexCall
    claims: lease_pb2.LeaseClaims
    span: Span
    on_over: Callable[[], None]


class KeptCalls:
    """Holds the slots of calls whose stream is broken, and their copies after that.

    `on_end` ends a call that has no stream. All decisions are made on the event loop, without a
    wait between a check and its effect.
    """

    def __init__(
        self,
        copies: Copies,
        metrics: WorkerMetrics,
        on_end: Callable[[RunningCall, CallEnd], None],
    ) -> None:
        self.copies = copies
        self.pace = CopyPace()
        self._metrics = metrics
        self._end = on_end
        self._running: dict[DuplexCall, RunningCall] = {}
        self._timers: dict[SessionCopy, asyncio.TimerHandle] = {}
        self._giving = set[asyncio.Task[Any]]()  # calls whose client has a copy
        copies.on_given_up = self._on_given_up

    # From the servicer.

    def began(self, running: RunningCall) -> None:
        """Note a call that holds its slot."""
        self._running[running.call] = running

    def broken(self, running: RunningCall) -> None:
        """Hold the slot of a call whose stream is broken. Free the slot after a while."""
        call, copy = running.call, running.call.copy
        if copy is None or not call.is_detached or copy.is_detached:
            return
        self.copies.detach(copy, asyncio.get_running_loop().time())
        _log.info("a session has lost its edge; its slot is held for %g s", copy.hold_s)
        self._set_timer(copy, copy.hold_s, self._on_held)
        call.ended.add_done_callback(lambda end: self._on_end(running, end.result()))

    def ended(self, call: DuplexCall) -> None:
        """Delete the copy of a call that has ended, or keep it after the end."""
        self._running.pop(call, None)
        copy = call.copy
        if copy is None or copy.is_deleted:
            return
        if not call.keeps_copy:
            self._delete(copy)
            return
        now_s = asyncio.get_running_loop().time()
        if not copy.is_detached:
            self.copies.detach(copy, now_s)
        # The time of the copy began with the break, not with the end of the slot.
        self._set_timer(copy, copy.broken_s + copy.within_s - now_s, self._delete)

    def stop(self) -> None:
        """Delete all copies, because the process ends."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self.pace.stop()
        self.copies.clear()
        for task in self._giving:
            task.cancel()

    def _call_of(self, copy: SessionCopy) -> RunningCall | None:
        """Return the call that has the slot of a session; None if the slot is free again."""
        calls = self._running.values()
        return next(
            (one for one in calls if one.call.copy is copy and not one.call.ended.done()), None
        )

    # From other edges.

    def attach(self, context: _Context, attach: session_pb2.Attach) -> tuple[RunningCall, Attached]:
        """Take a session for a new stream, and end its former one. Raises FabricError.

        So the latest valid `attach` wins.
        """
        try:
            _check_role(context)
            copy = self.copies.find(attach)
            running = self._call_of(copy)
            if running is None:
                raise FabricError(Reason.UNKNOWN_SESSION, "the slot of the session is free again")
        except FabricError as error:
            self._count(error)
            raise
        self.pace.attached()
        copy.attach_number += 1
        detached_s = _detached_s(copy)
        copy.is_detached = False
        self._clear_timer(copy)
        connection = running.call.attach(context)
        self._metrics.attached(AttachOutcome.ATTACHED)
        return running, Attached(connection, attach, detached_s)

    async def take_over(self, context: _Context, attach: session_pb2.Attach) -> None:
        """Send the copy of a session without a slot; delete it when the caller needs it no more.

        A caller that vanishes before may be lost with the session, so the copy is then kept.
        """
        try:
            _check_role(context)
            copy = self.copies.find(attach)
            if self._call_of(copy):
                raise FabricError(Reason.SLOT_OCCUPIED, "the session has its slot")
            self.pace.attached()
            make, detached_s = session_pb2.TakeOverResponse, _detached_s(copy)
            with contextlib.closing(copy.kept(make)) as past_units:
                for response in attach_responses(copy, attach, detached_s, make):
                    await _write(context, copy, response)
                for response in past_units:
                    if response.kept.is_last:
                        break
                    await _write(context, copy, response)
            if copy.is_deleted:
                raise superseded()
        except FabricError as error:
            self._count(error)
            raise
        await self._give(context, copy)

    async def _give(self, context: _Context, copy: SessionCopy) -> None:
        """Send the last message of a copy, and keep it until the caller needs it no more."""
        task = asyncio.current_task()
        if task is None:
            raise AssertionError("a copy is given outside of a call")
        self._giving.add(task)
        self.copies.take(copy)
        self._clear_timer(copy)
        is_done = False
        try:
            last = session_pb2.Kept(is_last=True)
            await context.write(session_pb2.TakeOverResponse(kept=last))
            self._metrics.attached(AttachOutcome.TAKEN_OVER)
            request = await context.read()
            is_done = isinstance(request, session_pb2.TakeOverRequest) and request.is_done
        finally:
            self._giving.discard(task)
            if is_done:
                self._delete(copy)
            elif not copy.is_deleted:
                self.copies.give_back(copy, asyncio.get_running_loop().time())
                self._set_timer(copy, copy.within_s, self._delete)

    def _count(self, error: FabricError) -> None:
        self._metrics.attached(_OUTCOMES.get(error.reason, AttachOutcome.REFUSED))

    # Timers and ends.

    def _set_timer(
        self, copy: SessionCopy, seconds: float, call: Callable[[SessionCopy], None]
    ) -> None:
        self._clear_timer(copy)
        loop = asyncio.get_running_loop()
        self._timers[copy] = loop.call_later(max(seconds, 0.0), call, copy)

    def _clear_timer(self, copy: SessionCopy) -> None:
        if timer := self._timers.pop(copy, None):
            timer.cancel()

    def _on_held(self, copy: SessionCopy) -> None:
        """Give the slot of a session back whose client has not returned in time."""
        if running := self._call_of(copy):
            running.call.keeps_copy = True
            running.call.close(session_pb2.CLOSE_REASON_CLIENT)

    def _on_end(self, running: RunningCall, end: CallEnd) -> None:
        """Finish a call that has ended while it had no stream."""
        if running.call.is_detached and running.call in self._running:
            self._end(running, end)

    def _on_given_up(self, copy: SessionCopy, reason: LossReason) -> None:
        """End the call of a copy that was given up, if it has no stream."""
        _log.warning("the copy of a session was given up: %s", reason)
        self._metrics.copy_given_up(reason)
        self._clear_timer(copy)
        running = self._call_of(copy)
        if running and running.call.is_detached:
            running.call.close(session_pb2.CLOSE_REASON_CLIENT)

    def _delete(self, copy: SessionCopy) -> None:
        self._clear_timer(copy)
        self.copies.delete(copy)


async def _write(
    context: _Context, copy: SessionCopy, response: session_pb2.TakeOverResponse
) -> None:
    """Write a part of a copy. Raises FabricError if another caller has had the whole meanwhile."""
    await context.write(response)
    if copy.is_deleted or copy.is_taken:
        raise superseded()


def _detached_s(copy: SessionCopy) -> float:
    return asyncio.get_running_loop().time() - copy.broken_s if copy.is_detached else 0.0


def _check_role(context: _Context) -> None:
    """Refuse every caller that has a certificate and is no edge."""
    caller = peer_identity(context)
    if caller is not None and caller.role is not Role.EDGE:
        raise FabricError(Reason.NOT_ALLOWED, "only an edge may continue a session")
