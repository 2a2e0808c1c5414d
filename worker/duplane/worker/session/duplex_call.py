"""One Converse call: a full-duplex session from its claim to its end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, assert_never

from duplane.fabric.durations import to_duration
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.v1 import lease_pb2, session_pb2
from duplane.worker.engine.engine import AnyEngine
from duplane.worker.engine.events import (
    AnsweredUnit,
    ChatStep,
    DroppedUnit,
    Event,
    FailedUnit,
    Lost,
    RebuildRefused,
)
from duplane.worker.engine.preparation import AbandonedError
from duplane.worker.engine.unit_record import UnitRecord
from duplane.worker.models.types import (
    ConversationOptions,
    Opened,
    OptionError,
    PastUnit,
    Rebuilt,
)
from duplane.worker.session.call import MODEL_FAILED, Call, CallEnd, Connection, Stream
from duplane.worker.session.call_state import CallState, CallStateMachine
from duplane.worker.session.copies import (
    REPLAY_S,
    Copies,
    SessionCopy,
    attach_responses,
    superseded,
)
from duplane.worker.session.copy_pace import CopyPace
from duplane.worker.session.duplex_options import (
    conversation_options,
    field_path,
    invalid_option,
    sent_paths,
    token_limit,
)
from duplane.worker.session.rebuild_check import check_model, check_units, parts_of
from duplane.worker.session.unit_check import check_unit
from duplane.worker.session.unit_reporter import UnitReporter
from duplane.worker.settings import SessionLimits

_log = logging.getLogger(__name__)

_UNITS_PER_TURN = 64  # past units without pictures that are prepared in one turn of the event loop
DuplexConnection = Connection[session_pb2.ConverseResponse]
CONTEXT_FULL = "CONTEXT_FULL"  # the model's reason if a unit does not fit into the context


class SlotListener(NamedTuple):
    """What is called when a session changes in a way that the reports of its slot show.

    `on_pause(is_paused)` is called at every pause and resume, and `on_fixed` when the client says
    that the session can no longer move to another worker.
    """

    on_pause: Callable[[bool], None]
    on_fixed: Callable[[], None]


class Attached(NamedTuple):
    """A later stream of a call, which had none for `detached_s`, and what its client has sent."""

    connection: DuplexConnection
    request: session_pb2.Attach
    detached_s: float


class DuplexCall(Call[session_pb2.ConverseResponse]):
    """The call of one duplex session, after its claim.

    `copies` keep the session if the client asks for it. Then the call outlives its stream, and
    `attach` gives it another one.
    """

    def __init__(
        self,
        stream: Stream,
        state: CallStateMachine,
        claims: lease_pb2.LeaseClaims,
        engine: AnyEngine,
        reporter: UnitReporter,
        limits: SessionLimits,
        listener: SlotListener,
        copies: Copies,
    ) -> None:
        outbox_capacity = engine.constants.count_of(limits.outbox_message_count)
        super().__init__(stream, claims.slot, engine, limits, outbox_capacity)
        self._state = state
        self._reporter = reporter
        self._listener = listener
        self._copies = copies
        self._session_id = claims.session_id
        self.copy: SessionCopy | None = None
        # True if the copy must outlive the call although the client has ended the call.
        self.keeps_copy = False
        # What `keep` needs; None when it can no longer come.
        self._keepable: tuple[session_pb2.Open, session_pb2.Opened] | None = None
        self._opening: session_pb2.Open | None = None
        self._settled = asyncio.Event()
        # True while a client that has attached waits for the copy, which will have all outcomes.
        self._is_copying = False
        self._is_omni = claims.kind == lease_pb2.SESSION_KIND_OMNI_DUPLEX
        self._token_limit = engine.constants.context_capacity
        self._last_sequence = -1
        self._is_open = False
        self._is_bounded = True
        self._options = ConversationOptions()
        self._rebuilt: asyncio.Future[Rebuilt] | None = None  # while past units are rebuilt
        self._sent_paths: frozenset[str] = frozenset()
        self._short_voices: frozenset[str] = frozenset()
        self._leaving_reasons = set[session_pb2.LeavingReason]()
        claimed = session_pb2.Claimed(open_timeout=to_duration(limits.open_timeout_s))
        self._send(session_pb2.ConverseResponse(claimed=claimed))

    def close(self, reason: session_pb2.CloseReason) -> None:
        """End the session with `closed`, but with an error if the engine fails before `opened`."""
        if reason == session_pb2.CLOSE_REASON_ENGINE_FAILED:
            self._on_lost()
        else:
            is_ended = reason == session_pb2.CLOSE_REASON_OPERATOR
            message = "ended by an operator" if is_ended else ""
            self.end(session_pb2.Closed(reason=reason, message=message))

    def leave(self, leaving: session_pb2.Leaving) -> None:
        """Tell the client, at most once for each reason, that the worker will end the session."""
        if not self._end.done() and leaving.reason not in self._leaving_reasons:
            self._leaving_reasons.add(leaving.reason)
            self._send(session_pb2.ConverseResponse(leaving=leaving))

    def stay(self) -> None:
        """Tell the client that the worker no longer drains, if it was told that it drains."""
        if not self._end.done() and session_pb2.LEAVING_REASON_DRAIN in self._leaving_reasons:
            self._leaving_reasons.remove(session_pb2.LEAVING_REASON_DRAIN)
            self._send(session_pb2.ConverseResponse(staying=session_pb2.Staying()))

    # The streams of a session with a copy.

    @property
    def _is_kept(self) -> bool:
        return self.copy is not None and not self.copy.is_deleted and not self._end.done()

    @property
    def ended(self) -> asyncio.Future[CallEnd]:
        """The end of the call."""
        return self._end

    @property
    def is_detached(self) -> bool:
        """Whether the call has no stream."""
        return self._connection.left.done()

    @property
    def is_adopted(self) -> bool:
        """Whether another edge than the holder of the lease has taken the session."""
        return self.copy is not None and self.copy.attach_number > 0

    def _lose(
        self,
        connection: DuplexConnection,
        error: FabricError | None,
    ) -> None:
        if self._is_kept:
            connection.leave(error)
        elif not connection.left.done():
            super()._lose(connection, error)

    def abandon(self, stream: Stream) -> bool:
        """Note that a stream has ended. Return whether the call goes on without it."""
        if not self._is_kept:
            return self._connection.stream is not stream
        if self._connection.stream is stream:
            self._connection.leave(None)
        return True

    def attach(self, stream: Stream) -> DuplexConnection:
        """Continue the call on another stream. The client of the former one gets SUPERSEDED."""
        former = self._connection
        self._connection = DuplexConnection(stream, former.capacity)
        former.leave(superseded())
        self._leaving_reasons.clear()  # this client does not know them
        if self.copy:  # the client sends a unit again that was prepared when the stream was lost
            self._last_sequence = self.copy.received_sequence
        self._state.attached(time.monotonic())
        self._is_copying = True
        return self._connection

    async def send_session(self, attached: Attached, pace: CopyPace) -> None:
        """Send the session to a client that has attached, when all units have their outcomes.

        The past units follow at their `pace`.
        """
        copy, (connection, request, detached_s) = self.copy, attached
        if copy is None:
            raise ValueError("the call has no copy")
        if not copy.is_settled:
            waits = asyncio.ensure_future(self._settled.wait())
            try:
                ends = {waits, self._end, connection.left}
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            finally:
                waits.cancel()
        if connection is self._connection:
            self._is_copying = False
        with self._ending_on_errors(connection):
            make = session_pb2.ConverseResponse
            connection.background = copy.kept(make)
            for response in attach_responses(copy, request, detached_s, make):
                if self._end.done() or connection.left.done():
                    return
                if copy.is_deleted:  # it was given up meanwhile
                    raise FabricError(Reason.UNKNOWN_SESSION, "the copy was given up")
                await self._write_one(connection, response)
        _ask_for_part(connection, pace, asyncio.get_running_loop().time())

    def _last_response(self, end: CallEnd) -> session_pb2.ConverseResponse | None:
        if isinstance(end, FabricError):
            return None
        dropped_count = self.channel.dropped_count
        return session_pb2.ConverseResponse(closed=self._reporter.closed(end, dropped_count))

    # From the client.

    async def _receive(self, connection: DuplexConnection) -> None:
        with self._ending_on_errors(connection):
            while not self._end.done():
                try:
                    async with asyncio.timeout(self._state.left_s(time.monotonic())):
                        request = await connection.stream.read()
                except TimeoutError:
                    self.end(self._state.expire())
                    return
                if connection.left.done():
                    return
                if not isinstance(request, session_pb2.ConverseRequest):
                    # The client has half-closed the call, or the connection is broken.
                    self._lose(connection, None)
                    return
                await self._receive_one(connection, request)

    async def _receive_one(
        self,
        connection: DuplexConnection,
        request: session_pb2.ConverseRequest,
    ) -> None:
        message = self._state.receive(request, time.monotonic())
        if message == "unit":
            await self._receive_unit(connection, request)
        elif message == "open":
            await self._open(request.open)
        elif message == "keep":
            self._keep(request.keep)
        elif message == "rebuild":
            await self._rebuild(request.rebuild)
        elif message in ("pause", "resume"):
            if self.copy:
                self.copy.is_paused = message == "pause"
            self._listener.on_pause(message == "pause")
        elif message == "close":
            self.keeps_copy = request.close.keep_copy
            self.close(session_pb2.CLOSE_REASON_CLIENT)

    async def _open(self, request: session_pb2.Open) -> None:
        rate = self._engine.constants.input_hertz
        options, self._short_voices = conversation_options(request, self._limits, rate)
        self._options = options
        self._opening = request
        self._token_limit = token_limit(request, self._token_limit)
        self._sent_paths = sent_paths(request)
        _log.debug("opens with the settings %s", sorted(self._sent_paths))
        self._reporter.opening()
        try:
            prepared = await self._engine.prepare_conversation(self.channel, options)
        except OptionError as error:
            raise invalid_option(error) from None
        except AbandonedError:
            raise
        except Exception:  # noqa: BLE001 - the border to the model: logged, and ends one session
            _log.exception("slot %d: the conversation could not be prepared", self.channel.slot)
            self._on_lost()
            return
        self._engine.open(self.channel, prepared)

    def _keep(self, keep: session_pb2.Keep) -> None:
        if not (self._keepable and self._copies.is_enabled):
            fault = "keep can come only directly after opened, from a worker that keeps copies"
            raise FabricError(Reason.OUT_OF_ORDER, fault)
        count = self._engine.constants.count_of(REPLAY_S)
        self.copy = self._copies.keep(self._session_id, keep, *self._keepable, replay_count=count)
        self._keepable = None

    async def _rebuild(self, request: session_pb2.Rebuild) -> None:
        """Let the model rebuild past units, and answer when all of them are rebuilt.

        No message is read meanwhile, so a session holds the units of one message only. Decoded
        pictures are large. So the number of units whose pictures are decoded at the same time is
        at most the capacity of the inbox.
        """
        if not self._is_open:
            raise FabricError(Reason.OUT_OF_ORDER, "rebuild cannot come before opened")
        self._keepable = None
        if self.copy:
            self.copy.is_ready = False
        check_model(request, self._engine.constants.digest)
        if self._options.seed is None and not self._options.is_greedy:
            raise FabricError(Reason.REBUILD_REFUSED, "open has no seed", field="seed")
        units = check_units(
            request,
            self._limits,
            self._engine.constants,
            slot=self.channel.slot,
            last_sequence=self._last_sequence,
            is_omni=self._is_omni,
        )
        done, context_length, lack = 0, 0, ""
        for part in parts_of(units, self._limits.inbox_unit_count):
            has_more = done + len(part) < len(units)
            rebuilt = await self._rebuild_part(part, done, has_more=has_more)
            context_length, lack = rebuilt.context_length, rebuilt.lack
            done += len(part)
        if request.is_last and lack:
            raise FabricError(Reason.REBUILD_REFUSED, lack, field="rebuild.units")
        self._last_sequence = units[-1].unit.sequence if units else self._last_sequence
        self._state.rebuilt(time.monotonic(), is_last=request.is_last)
        if self.copy:
            self._copies.rebuild(self.copy, request)
            self.copy.is_ready = request.is_last
        answer = session_pb2.Rebuilt(
            sequence=self._last_sequence, context_token_count=context_length
        )
        self._send(session_pb2.ConverseResponse(rebuilt=answer))

    async def _rebuild_part(
        self, part: Sequence[PastUnit], first: int, *, has_more: bool
    ) -> Rebuilt:
        """Rebuild some units of a message, from number `first` on."""
        units = list(part)
        for index, past in enumerate(units):
            if index and index % _UNITS_PER_TURN == 0:
                await asyncio.sleep(0)
            if past.unfed_rows:
                continue
            entry = await self._prepare_unit(UnitRecord(past.unit))
            if isinstance(entry, FailedUnit):
                path = f"rebuild.units[{first + index}].{entry.field}"
                raise FabricError(Reason.INVALID_FIELD, entry.message, field=path)
            units[index] = replace(past, unit=entry.unit)
        self._rebuilt = asyncio.get_running_loop().create_future()
        self._engine.rebuild(self.channel, units, has_more=has_more)
        return await self._rebuilt

    async def _receive_unit(
        self,
        connection: DuplexConnection,
        request: session_pb2.ConverseRequest,
    ) -> None:
        unit = request.unit
        self._keepable = None
        entry = check_unit(
            unit,
            self._limits,
            self._engine.constants,
            slot=self.channel.slot,
            last_sequence=self._last_sequence,
            is_omni=self._is_omni,
            is_paused=self._state.state is CallState.PAUSED,
        )
        self._last_sequence = max(self._last_sequence, unit.sequence)
        if unit.cannot_move:
            self._listener.on_fixed()
        if isinstance(entry, UnitRecord):
            # No message is read during this wait, so units keep their order and are decoded one at
            # a time.
            entry = await self._prepare_unit(entry)
            if connection.left.done():
                return  # another edge has the session
        if self.copy:
            self.copy.receive(request)
            self._settled.clear()
        self._engine.put(self.channel, entry)

    async def _prepare_unit(self, record: UnitRecord) -> UnitRecord | FailedUnit:
        """Prepare a unit. If this fails, end the session and raise AbandonedError."""
        try:
            return await self._engine.prepare_unit(self.channel, record)
        except AbandonedError:
            raise
        except Exception:  # noqa: BLE001 - the border to the model: logged, and ends one session
            _log.exception("slot %d: a unit could not be prepared", self.channel.slot)
            self._on_lost()
            raise AbandonedError from None

    # From the device thread.

    def _on_event(self, event: Event) -> None:
        if self._end.done():
            return
        match event:
            case AnsweredUnit():
                delta = self._reporter.delta(event, time.monotonic())
                self._answer(delta, session_pb2.ConverseResponse(delta=delta))
                if self._is_bounded and event.output.context_length >= self._token_limit:
                    self.close(session_pb2.CLOSE_REASON_CONTEXT_FULL)
            case FailedUnit():
                self._on_failed_unit(event)
            case DroppedUnit():
                self._reporter.dropped(event.entry)
            case Opened():
                self._on_opened(event)
            case Rebuilt() | RebuildRefused():
                self._on_rebuilt(event)
            case Lost():
                self._on_lost()
            case ChatStep():
                pass  # events of chats only
            case _:
                assert_never(event)

    def _on_opened(self, opened: Opened) -> None:
        if opened.context_length >= self._token_limit:
            message = f"the prompt fills {opened.context_length} of {self._token_limit} tokens"
            self.end(FabricError(Reason.INVALID_FIELD, message, field="system_prompt"))
            return
        self._is_open = True
        self._reporter.opened()
        # A context window keeps the context below the worker's limit. Then only a lower limit of
        # the client ends the session.
        is_own_limit = self._token_limit < self._engine.constants.context_capacity
        self._is_bounded = is_own_limit or not opened.has_window
        ignored = self._short_voices.union(map(field_path, opened.ignored)) & self._sent_paths
        message = session_pb2.Opened(
            prompt_token_count=opened.context_length,
            context_token_limit=self._token_limit,
            ignored_fields=sorted(ignored),
            model_digest=self._engine.constants.digest,
            accepts_audio_exponent=True,
            accepts_audio_int16=True,
            accepts_row_count=self._engine.constants.accepts_unfed_units,
            accepts_speech_requests=self._engine.constants.accepts_speech_requests,
            accepts_keep=self._copies.is_enabled and bool(self._engine.constants.digest),
        )
        if self._opening and self._copies.is_enabled:
            self._keepable = self._opening, message
        self._opening = None
        self._send(session_pb2.ConverseResponse(opened=message))

    def _answer(
        self,
        outcome: session_pb2.Delta | session_pb2.Failed,
        response: session_pb2.ConverseResponse,
    ) -> None:
        """Put the outcome of a unit into the copy, and send it unless the copy will be sent."""
        if self.copy:
            self._copies.answer(self.copy, outcome)
            if self.copy.is_settled:
                self._settled.set()
        if not self._is_copying:
            self._send(response)

    def _on_rebuilt(self, event: Rebuilt | RebuildRefused) -> None:
        if isinstance(event, RebuildRefused):
            self.end(FabricError(event.reason, event.message, field=event.field))
        elif self._rebuilt and not self._rebuilt.done():
            self._rebuilt.set_result(event)

    def _on_failed_unit(self, failure: FailedUnit) -> None:
        if failure.reason == CONTEXT_FULL:
            # This unit is valid, but the `settle` of the previous unit has filled the context.
            self.close(session_pb2.CLOSE_REASON_CONTEXT_FULL)
            return
        failed = self._reporter.failed(failure)
        self._answer(failed, session_pb2.ConverseResponse(failed=failed))
        if failure.is_fatal:
            self._on_lost()

    def _on_lost(self) -> None:
        if not self._is_open:
            self.end(FabricError(Reason.ENGINE_FAILED, MODEL_FAILED))
            return
        reason = session_pb2.CLOSE_REASON_ENGINE_FAILED
        self.end(session_pb2.Closed(reason=reason, message=MODEL_FAILED))


def _ask_for_part(connection: DuplexConnection, pace: CopyPace, since_s: float) -> None:
    """Send the next part of a copy when its pace allows it, and then the part after it."""
    again = partial(_ask_for_part, connection, pace, since_s)
    pace.ask(since_s, partial(connection.put_background, again))
