"""Finds the session to which a client returns, or says why there is none."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Iterator

from duplane.edge.access import Caller
from duplane.edge.client_errors import RESUME_PREFIX, ErrorCode
from duplane.edge.clock import Clock
from duplane.edge.close import GONE, Close, CloseReason
from duplane.edge.dialects.actions import Return
from duplane.edge.metrics import EdgeMetrics
from duplane.edge.session.attachment import Attachment
from duplane.edge.session.chat_runner import ChatRunner
from duplane.edge.session.detachment import Presence
from duplane.edge.session.duplex_runner import DuplexRunner
from duplane.edge.session.duplex_session import DuplexSession
from duplane.edge.session.returnable_session import NAMING_S
from duplane.edge.session.unit_state import Cursor
from duplane.edge.transport.client import Client, SocketClient
from duplane.fabric.monitoring.logs import logged_ids
from duplane.fabric.token_secrets import is_secret_of

_log = logging.getLogger(__name__)
OTHER_CLIENT = ErrorCode.RESUME_REFUSED, "token: the session belongs to another client or URL"
_MAX_ENDED = 1024  # tokens of sessions that have ended; the newest are kept


class Resumes:
    """The sessions of this edge to which clients may return.

    `runners` are the running sessions, which the registry adds and removes.
    """

    def __init__(
        self,
        runners: dict[DuplexRunner | ChatRunner, Caller],
        metrics: EdgeMetrics,
        clock: Clock,
    ) -> None:
        self._runners = runners
        self._metrics = metrics
        self._clock = clock
        self._ended: OrderedDict[str, bytes] = OrderedDict()  # session id -> digest of the token
        metrics.observe_detached(self._states)

    def _resumable(self) -> Iterator[DuplexRunner]:
        for runner in self._runners:
            if isinstance(runner, DuplexRunner) and runner.session.detachment:
                yield runner

    def _states(self) -> Iterator[str]:
        for runner in self._resumable():
            if runner.session.is_detached and (detachment := runner.session.detachment):
                yield detachment.presence.value

    def may_have(self, caller: Caller) -> bool:
        """Return whether a session of this caller's tenant is here."""
        return any(self._runners[runner].tenant == caller.tenant for runner in self._resumable())

    def end_longest_parked(self) -> bool:
        """End the session that has been without a slot for the longest time, if there is one."""
        parked = [
            (detachment.lost_s, runner)
            for runner in self._resumable()
            if (detachment := runner.session.detachment)
            and detachment.presence is Presence.PARKED
            and detachment.lost_s is not None
        ]
        if not parked:
            return False
        _, runner = min(parked, key=lambda one: one[0])
        _log.warning("a parked session ends: all journals together exceed --journal-total-bytes")
        runner.end(GONE)
        return True

    def may_be_elsewhere(self, returned: Return) -> bool:
        """Return whether the session that a client names was never at this edge, or may have left.

        If it has no socket here and the client has newer events, another edge may have taken it.
        """
        runner = self._find(returned)
        if runner is None:
            return bool(returned.session_id) and returned.session_id not in self._ended
        detachment, cursor = runner.session.detachment, Cursor(returned.unit, returned.part)
        return (
            detachment is not None
            and detachment.is_detached
            and detachment.is_proved_by(returned.secret)
            and detachment.is_ahead(cursor)
        )

    def has(self, returned: Return) -> bool:
        """Return whether the session that a client names is here."""
        return self._find(returned) is not None

    def forget(self, returned: Return) -> None:
        """End the session if it is here, because it continues at another edge."""
        if runner := self._find(returned):
            runner.end(Close(CloseReason.REPLACED))

    def ended(self, session: DuplexSession) -> None:
        """Remember the token of a session that has ended, to tell its client so."""
        is_replaced = session.closed and session.closed.reason is CloseReason.REPLACED
        is_elsewhere = is_replaced or session.may_go_on_elsewhere
        if not session.detachment or is_elsewhere:
            return
        self._ended[session.identity.session_id] = session.detachment.digest
        if len(self._ended) > _MAX_ENDED:
            self._ended.popitem(last=False)

    async def run(self, client: SocketClient, asking: DuplexSession, caller: Caller) -> None:
        """Serve the client of `asking`, which returns to another session, until it is gone."""
        returned = asking.returned
        if returned is None:
            raise AssertionError("the client does not return")
        found = self._attach(client, asking, returned, caller)
        if isinstance(found, Attachment):
            with logged_ids(returned.session_id, None):
                await _serve(found)
            return
        await self.refuse(client, asking, *found)

    async def refuse(
        self, client: Client, asking: DuplexSession, code: ErrorCode, message: str
    ) -> None:
        """Tell a client why it does not get the session that it has named."""
        self._metrics.resume_refused(code.removeprefix(RESUME_PREFIX))
        _log.info("session %s is not resumed: %s", asking.identity.session_id, code)
        client.send([asking.dialect.error(code, message, self._clock.now())])
        is_busy = code is ErrorCode.RESUME_BUSY
        reason = CloseReason.RESUME_BUSY if is_busy else CloseReason.RESUME_REFUSED
        close = Close(reason, code.value)
        await client.close(close, asking.dialect.close_code(close))

    def _attach(
        self, client: SocketClient, asking: DuplexSession, returned: Return, caller: Caller
    ) -> Attachment | tuple[ErrorCode, str]:
        """Give the client its session, or return why not. Nothing can interrupt this."""
        runner = self._find(returned)
        if runner is None:
            return self._unknown(returned)
        if not client.is_open:  # then the former socket keeps the session
            return ErrorCode.RESUME_BUSY, "the socket was lost"
        if refusal := runner.session.refuses(returned, self._clock.now()):
            return refusal
        if not runner.session.is_of_client_of(asking):
            return OTHER_CLIENT
        self._runners[runner] = caller
        return runner.resume(client, returned)

    def _find(self, returned: Return) -> DuplexRunner | None:
        """Return the session that a client names, without a check of its token."""
        for runner in self._resumable():
            if runner.session.identity.session_id == returned.session_id:
                return runner
        return None

    def _unknown(self, returned: Return) -> tuple[ErrorCode, str]:
        digest = self._ended.get(returned.session_id)
        if digest is None and returned.session_id:
            return ErrorCode.RESUME_LOST, "token: the session is lost"
        if digest and is_secret_of(digest, returned.secret):
            return ErrorCode.RESUME_EXPIRED, "token: the session has ended"
        return ErrorCode.RESUME_REFUSED, "token: it belongs to no session"


async def _serve(attachment: Attachment) -> None:
    """Read the socket until it is closed, by its client or by its session."""
    serving = asyncio.create_task(attachment.serve())
    try:
        await asyncio.wait({serving})
        if serving.cancelled() or serving.exception() is None:
            await attachment.is_closed.wait()
    finally:
        serving.cancel()
    if not serving.cancelled() and (error := serving.exception()):
        attachment.end(Close(CloseReason.FAILED, "internal error"))
        raise error


class _ReadError(Exception):
    """The first message is read; no other may be."""


class _FirstMessage:
    """Reads only the first message of a client."""

    def __init__(self) -> None:
        self.message = b"{}"

    async def receive(self, message: bytes, waited_s: float = 0.0) -> None:
        """Keep the message, and read no other."""
        del waited_s
        self.message = message
        raise _ReadError

    def end(self, close: Close) -> None:
        """Ignore the end: nothing has begun."""
        del close


async def first_message(client: Client) -> bytes:
    """Return the first message of a client; an empty object if none comes within NAMING_S."""
    first = _FirstMessage()
    with contextlib.suppress(TimeoutError, _ReadError):
        await asyncio.wait_for(client.serve(first), NAMING_S)
    return first.message
