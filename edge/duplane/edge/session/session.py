"""Base class of the sessions: decoding, queue events, time limits, closing. Pure.

A runner passes messages of the client, responses of the fabric, and the time to the session. A
method that handles one of these returns the events to send to the client. What else the runner must
do is appended to `Session.effects`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from duplane.edge.client_errors import ClientError, UnreadableError
from duplane.edge.clock import Moment
from duplane.edge.close import Close, CloseReason
from duplane.edge.dialects.actions import Action, Leave, Return
from duplane.edge.dialects.dialect import Dialect
from duplane.edge.payload.fields import Fields, parse
from duplane.edge.session.effects import Effect
from duplane.edge.session.receipt import Receipt
from duplane.edge.session.time_limits import EXPIRED, TimeLimit, TimeLimits
from duplane.edge.settings import Limits
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.v1 import lease_pb2

D = TypeVar("D", bound=Dialect)

# The reason why no lease was granted -> the close that the client gets.
_REFUSED = {
    Reason.QUEUE_FULL: Close(CloseReason.QUEUE_FULL, "Queue full"),
    Reason.TICKET_CANCELLED: Close(CloseReason.WORKER_BUSY, "taken out of the queue"),
    Reason.UNAVAILABLE: Close(CloseReason.WORKER_CONNECT_FAILED, "the worker cannot be reached"),
}
# The field that names an exhausted limit -> what the client reads.
_QUOTAS = {
    "tenant_limits.session_count": "sessions at the same time",
    "tenant_limits.waiting_count": "waiting sessions",
    "tenant_limits.daily_minutes": "minutes of this day (UTC)",
}
_DAILY_QUOTA = "tenant_limits.daily_minutes"
_DAY_S = 86_400
_NOT_READY = Close(CloseReason.SERVICE_UNAVAILABLE, "Service not ready")


@dataclass(frozen=True, slots=True)
class Decoded(Generic[D]):
    """One client message after decoding: its actions, or the error that refuses it.

    `dialect` is the dialect that decoded the message. There are two actions if the message implies
    another message before it. If it asks for another session, `returned` says for which.
    `is_decided` is false while a later message can still change the dialect.
    """

    dialect: D
    actions: tuple[Action, ...] = ()
    error: ClientError | UnreadableError | None = None
    returned: Return | None = None
    is_decided: bool = True


class Session(ABC, Generic[D]):
    """One session, from its first byte to its close."""

    def __init__(self, dialect: D, limits: Limits, now: Moment, *, is_decided: bool = True) -> None:
        """Begin a session. Without `is_decided`, the first event decides the dialect."""
        self.dialect: D = dialect
        self.identity = dialect.identity
        self.closed: Close | None = None
        self.has_slot = False  # the slot is claimed, not only granted
        self.effects: deque[Effect] = deque()  # the runner takes and executes them
        self._limits = limits
        self._is_decided = is_decided
        self._recorded_audio = b""
        self._receipt = Receipt.at(now)  # receipt of the message that is being applied
        self.time_limits = TimeLimits()  # call `expire` at the next deadline
        self._await_slot(now)

    @property
    @abstractmethod
    def is_running(self) -> bool:
        """Whether ending the session now would interrupt work."""

    @property
    def successor(self) -> Session[Any] | None:
        """The session that continues for the client, if it has replaced this one."""
        return None

    # --- the client ---

    def connected(self, now: Moment) -> list[bytes]:
        """Render what the client is told before it sends anything. Call this first."""
        return self.dialect.connected(now)

    def decode(self, message: bytes) -> Decoded[D]:
        """Decode one text frame. Changes nothing and never raises, so that a thread can run it.

        Decode the next message only after `receive` was called for this one.
        """
        try:
            event = parse(message, self._limits)
            return self._decode_event(event)
        except (ClientError, UnreadableError) as error:
            return Decoded(self.dialect, error=error, is_decided=self._is_decided)

    def _decode_event(self, event: Fields) -> Decoded[D]:
        """Decode an event. Raises ClientError."""
        if not self._is_decided:
            return self._decode_first(event)
        return Decoded(self.dialect, (self.dialect.decode(event),))

    def _decode_first(self, event: Fields) -> Decoded[D]:
        """Decode an event that may decide the dialect. Raises ClientError."""
        del event
        raise AssertionError("the dialect of this session is known from the start")

    def receive(
        self, message: bytes | Decoded[D], now: Moment, receipt: Receipt | None = None
    ) -> list[bytes]:
        """Handle one text frame, or the result of `decode` for a text frame.

        Without a `receipt` the frame was received now.
        """
        if self.closed:
            return []
        self._receipt = receipt or Receipt.at(now)
        decoded = self.decode(message) if isinstance(message, bytes) else message
        self.dialect, self._is_decided = decoded.dialect, decoded.is_decided
        if isinstance(decoded.error, UnreadableError):
            return self.end(Close(CloseReason.UNREADABLE, str(decoded.error)), now)
        if decoded.error is not None:
            return self._refuse(decoded.error, now)
        if decoded.returned is not None:
            return self._return(decoded.returned, now)
        events: list[bytes] = []
        try:
            for action in decoded.actions:
                events += self._apply(action, now)
        except ClientError as error:
            return self._refuse(error, now)
        return events

    def _return(self, returned: Return, now: Moment) -> list[bytes]:
        """Leave the client to another session."""
        raise AssertionError(f"no client of this session returns at {now}: {returned}")

    def _refuse(self, error: ClientError, now: Moment) -> list[bytes]:
        """Answer an invalid event with an `error`; the session continues."""
        return [self.dialect.error(error.code, error.message, now, error.input_id)]

    @abstractmethod
    def _apply(self, action: Action, now: Moment) -> list[bytes]:
        """Apply a valid event. If that is not possible now, raise ClientError before any change."""

    def _leave(self, leave: Leave, now: Moment) -> list[bytes]:
        return self.end(Close(CloseReason.CLIENT, client_reason=leave.reason), now)

    def take_recorded_audio(self) -> bytes:
        """Return the audio of the last message, as the client sent it; empty if not recorded."""
        audio, self._recorded_audio = self._recorded_audio, b""
        return audio

    # --- the queue ---

    def _await_slot(self, now: Moment) -> None:
        self._is_queued = False
        self.time_limits.start(TimeLimit.SCHEDULER, self._limits.scheduler_s, now)
        self.time_limits.start(TimeLimit.SLOT, self.dialect.queue_s, now)

    def queued(self, queued: lease_pb2.Queued, now: Moment) -> list[bytes]:
        """Render a queue position.

        The scheduler sends a position on every change and at intervals.
        """
        del now
        if self.closed:
            return []
        self.time_limits.stop(TimeLimit.SCHEDULER)
        is_update, self._is_queued = self._is_queued, True
        return self.dialect.queued(queued, is_update=is_update)

    def _leave_queue(self) -> None:
        """Record that the slot is claimed."""
        self.time_limits.stop(TimeLimit.SCHEDULER, TimeLimit.SLOT)
        self.has_slot = True

    def failed(self, error: FabricError, now: Moment) -> list[bytes]:
        """Handle a failure of the request for a slot, or of the call to the worker."""
        if self.closed:
            return []
        if self.is_running:
            return self._call_failed(error, now)
        return self._slot_refused(self._refusal_of(error, now), now)

    def _refusal_of(self, error: FabricError, now: Moment) -> Close:
        """Return the end of a session that gets no slot."""
        match error.reason:
            case Reason.KIND_NOT_SERVED:
                return Close(CloseReason.SERVICE_UNAVAILABLE, self.dialect.mode.unserved)
            case Reason.MODEL_NOT_SERVED:
                return Close(CloseReason.MODEL_NOT_SERVED, error.message)
            case Reason.INVALID_FIELD if error.field == "queue_token":
                return Close(CloseReason.MODE_REFUSED, error.message)
            case Reason.TENANT_QUOTA:
                return _quota_exhausted(error.field, now)
            case reason:
                return _REFUSED.get(reason, _NOT_READY)

    def _slot_refused(self, close: Close, now: Moment) -> list[bytes]:
        """Handle that the session gets no slot: it ends."""
        return self.end(close, now)

    @abstractmethod
    def _call_failed(self, error: FabricError, now: Moment) -> list[bytes]:
        """Handle a failure of the call to the worker."""

    # --- time and the end ---

    def expire(self, now: Moment) -> list[bytes]:
        """Apply the time limits that have passed.

        Stop after the first of them that has an effect.
        """
        for limit in self.time_limits.expired(now):
            events = self._expire(limit, now)
            if events or self.closed:
                return events
        return []

    def _expire(self, limit: TimeLimit, now: Moment) -> list[bytes]:
        if limit in (TimeLimit.SCHEDULER, TimeLimit.SLOT):
            return self._slot_refused(EXPIRED[limit], now)
        return self.end(EXPIRED[limit], now)

    def drain(self, now: Moment) -> list[bytes]:
        """Shut down: a waiting session ends now, a running one continues."""
        return [] if self.is_running else self.end(Close(CloseReason.SHUTDOWN), now)

    def end(self, close: Close, now: Moment) -> list[bytes]:
        """End the session. Only the first call has an effect."""
        if self.closed:
            return []
        self.time_limits.clear()
        self.closed = close
        return self.dialect.ended(close, now)

    @property
    def close_code(self) -> int:
        """The WebSocket close code of a session that has ended."""
        assert self.closed, "the session goes on"
        return self.dialect.close_code(self.closed)


def _quota_exhausted(field: str, now: Moment) -> Close:
    """Return the close for a tenant whose limit `field` is exhausted."""
    name = _QUOTAS.get(field)
    message = f"Quota exhausted: {name}" if name else "Quota exhausted"
    if field != _DAILY_QUOTA:
        return Close(CloseReason.QUOTA, message)
    return Close(CloseReason.QUOTA, message, retry_s=_DAY_S - now.wall_s % _DAY_S)
