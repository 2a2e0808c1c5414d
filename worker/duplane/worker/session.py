"""One Converse call that holds a slot: what it reads, what it writes, and when it ends.

Knows the stream and the engine; nothing of leases or of other sessions.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, assert_never

import grpc.aio

from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.v1 import lease_pb2, session_pb2
from duplane.worker.deltas import Account
from duplane.worker.engine import Engine
from duplane.worker.inbox import Refusal, Unit
from duplane.worker.model.types import Opened, UnitFailure
from duplane.worker.options import (
    check_unit,
    conversation_options,
    field_path,
    invalid_option,
    sent_paths,
    token_limit,
)
from duplane.worker.phases import Phase, Phases
from duplane.worker.preparation import AbandonedError
from duplane.worker.rounds import ChatStep, Done, Event, Lost, OpenRefused
from duplane.worker.settings import SessionLimits

_log = logging.getLogger(__name__)

CONTEXT_FULL = "CONTEXT_FULL"  # what the model answers to a unit that it has no room for

Stream = grpc.aio.ServicerContext[Any, Any]
End = session_pb2.Closed | FabricError


class Session:
    """A claimed session, from `claimed` to its end.

    `release` is called once, as soon as the end is known: the slot waits for no client.
    `on_unit` is told each unit's seconds from inbox to delta.
    """

    def __init__(
        self,
        stream: Stream,
        phases: Phases,
        claims: lease_pb2.LeaseClaims,
        engine: Engine,
        account: Account,
        limits: SessionLimits,
        on_unit: Callable[[float], None],
    ) -> None:
        self._stream = stream
        self._phases = phases
        self._engine = engine
        self._account = account
        self._limits = limits
        self._on_unit = on_unit
        self._is_omni = claims.kind == lease_pb2.SESSION_KIND_OMNI_DUPLEX
        self._token_limit = engine.model.context_capacity
        self._last_sequence = -1
        self._is_open = False
        self._is_bounded = True
        self._sent_paths: frozenset[str] = frozenset()
        self._end: asyncio.Future[End] = asyncio.get_running_loop().create_future()
        # One place more than is let in, for the last: `closed`, or None before a failure.
        self._outbox = asyncio.Queue[session_pb2.ConverseResponse | None](
            limits.outbox_message_count + 1
        )
        self.conversation = engine.converse(claims.slot, self._on_event)

    def end(self, end: End) -> None:
        """End the session; the first reason given counts."""
        if not self._end.done():
            self._end.set_result(end)

    async def run(self, release: Callable[[], None]) -> None:
        """Serve the call to its end. Raises FabricError when it must end with a failure."""
        claimed = session_pb2.Claimed()
        claimed.open_timeout.FromNanoseconds(round(self._limits.open_timeout_s * 1e9))
        self._say(session_pb2.ConverseResponse(claimed=claimed))
        async with asyncio.TaskGroup() as tasks:
            reader = tasks.create_task(self._read())
            writer = tasks.create_task(self._write())
            end = await self._end
            dropped_count = self._engine.silence(self.conversation)
            release()
            reader.cancel()
            last = None
            if isinstance(end, session_pb2.Closed):
                closed = self._account.closed(end, dropped_count)
                last = session_pb2.ConverseResponse(closed=closed)
            self._outbox.put_nowait(last)
            await asyncio.wait({writer}, timeout=self._limits.flush_timeout_s)
            writer.cancel()
        if isinstance(end, FabricError):
            raise end

    # What comes in.

    async def _read(self) -> None:
        """Take messages until the end; every way in which reading can stop is an end."""
        try:
            while not self._end.done():
                async with asyncio.timeout_at(self._phases.deadline_s):
                    request = await self._stream.read()
                if not isinstance(request, session_pb2.ConverseRequest):
                    # The client has closed its side.
                    self.end(session_pb2.Closed(reason=session_pb2.CLOSE_REASON_CLIENT))
                    return
                self._phases.receive(request, time.monotonic())
                await self._receive(request)
        except TimeoutError:
            try:
                self.end(self._phases.expire())
            except FabricError as error:
                self.end(error)
        except FabricError as error:
            self.end(error)
        except grpc.aio.BaseError as error:
            self._on_gone(error)
        except AbandonedError:
            pass  # the end is known already

    async def _receive(self, request: session_pb2.ConverseRequest) -> None:
        match request.WhichOneof("message"):
            case "unit":
                await self._receive_unit(request.unit)
            case "open":
                options = conversation_options(request.open, self._limits)
                self._token_limit = token_limit(request.open, self._token_limit)
                self._sent_paths = sent_paths(request.open)
                await self._engine.prepare(self.conversation, options)
                self._engine.open(self.conversation, options)
            case "close":
                self.end(session_pb2.Closed(reason=session_pb2.CLOSE_REASON_CLIENT))
            case _:
                pass  # all there is to the others is the phase

    async def _receive_unit(self, unit: session_pb2.Unit) -> None:
        entry = check_unit(
            unit,
            self._limits,
            last_sequence=self._last_sequence,
            is_omni=self._is_omni,
            is_paused=self._phases.phase is Phase.PAUSED,
            received_s=time.monotonic(),
            receive_time_ns=time.time_ns(),
        )
        self._last_sequence = max(self._last_sequence, unit.sequence)
        if isinstance(entry, Unit) and entry.frames:
            # Nothing else is read meanwhile, so order is kept and no more than one unit waits.
            entry = await self._engine.prepare_unit(self.conversation, entry)
        self._engine.put(self.conversation, entry)

    # What the engine tells.

    def _on_event(self, event: Event) -> None:
        if self._end.done():
            return
        match event:
            case Opened():
                self._on_opened(event)
            case Done():
                self._on_done(event)
            case Refusal():
                failed = self._account.refused(event)
                self._say(session_pb2.ConverseResponse(failed=failed))
            case OpenRefused():
                self.end(invalid_option(event.error))
            case Lost():
                self._on_lost()
            case ChatStep():
                pass  # only chats have them
            case _:
                assert_never(event)

    def _on_opened(self, opened: Opened) -> None:
        if opened.context_length >= self._token_limit:
            message = f"the prompt fills {opened.context_length} of {self._token_limit} tokens"
            self.end(FabricError(Reason.INVALID_FIELD, message, field="system_prompt"))
            return
        self._is_open = True
        # With a window the context is never full at the worker's own limit: there is room again.
        is_own_limit = self._token_limit < self._engine.model.context_capacity
        self._is_bounded = is_own_limit or not opened.has_window
        message = session_pb2.Opened(
            prompt_token_count=opened.context_length,
            context_token_limit=self._token_limit,
            ignored_fields=[
                path for path in map(field_path, opened.ignored) if path in self._sent_paths
            ],
        )
        self._say(session_pb2.ConverseResponse(opened=message))

    def _on_done(self, done: Done) -> None:
        result = done.result
        if isinstance(result, UnitFailure):
            self._on_failure(done, result)
            return
        now_s = time.monotonic()
        delta = self._account.delta(done, result, now_s)
        self._on_unit(now_s - done.taken.unit.received_s)
        self._say(session_pb2.ConverseResponse(delta=delta))
        if self._is_bounded and result.context_length >= self._token_limit:
            self.end(session_pb2.Closed(reason=session_pb2.CLOSE_REASON_CONTEXT_FULL))

    def _on_failure(self, done: Done, failure: UnitFailure) -> None:
        if failure.reason == CONTEXT_FULL:
            # No fault of the unit: settle has filled what the delta before had left.
            self.end(session_pb2.Closed(reason=session_pb2.CLOSE_REASON_CONTEXT_FULL))
            return
        failed = self._account.failed(done, failure)
        self._say(session_pb2.ConverseResponse(failed=failed))
        if failure.is_fatal:
            self._on_lost()

    def _on_lost(self) -> None:
        message = "the model failed; its log says why"
        if not self._is_open:
            self.end(FabricError(Reason.ENGINE_FAILED, message))
            return
        reason = session_pb2.CLOSE_REASON_ENGINE_FAILED
        self.end(session_pb2.Closed(reason=reason, message=message))

    # What goes out.

    def _say(self, response: session_pb2.ConverseResponse) -> None:
        if self._outbox.qsize() >= self._limits.outbox_message_count:
            self._on_slow()
            return
        self._outbox.put_nowait(response)

    async def _write(self) -> None:
        """Write what is told, up to and with the last; stop when the client is gone."""
        try:
            while response := await self._outbox.get():
                async with asyncio.timeout(self._limits.stall_timeout_s):
                    await self._stream.write(response)
                if response.HasField("closed"):
                    return
        except TimeoutError:
            self._on_slow()
        except grpc.aio.BaseError as error:
            self._on_gone(error)

    def _on_slow(self) -> None:
        self.end(FabricError(Reason.SLOW_CLIENT, "the client does not read what it is sent"))

    def _on_gone(self, error: Exception) -> None:
        _log.debug("the client is gone: %s", error)
        self.end(session_pb2.Closed(reason=session_pb2.CLOSE_REASON_CLIENT))
