"""Continues sessions of other edges, whose clients return to this one."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from typing import NamedTuple

from duplane.edge.client_errors import ErrorCode
from duplane.edge.clock import Clock
from duplane.edge.close import GONE
from duplane.edge.dialects.actions import Return
from duplane.edge.resumes import OTHER_CLIENT
from duplane.edge.routing import restored_session
from duplane.edge.session.duplex_session import DuplexSession
from duplane.edge.session.edge_note import EdgeNote
from duplane.edge.session.returnable_runner import Adoption
from duplane.edge.session_registry import ClientRequest, SessionRegistry
from duplane.edge.settings import Limits
from duplane.edge.transport.client import SocketClient
from duplane.edge.transport.rate_limit import NetworkRates
from duplane.fabric.attaching import TakenSession
from duplane.fabric.client import FabricClient
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.v1 import session_pb2

_log = logging.getLogger(__name__)

# Sessions that are looked for at the same time; further clients must come again. So clients that
# name sessions that do not exist cause few calls.
_AT_ONCE = 64
_FAILED_PER_MINUTE = 60.0  # returns of a network that find no session; further ones must come again
_TAKEN_PER_MINUTE = 10.0  # returns to one session, of which the whole copy is sent
_BUSY = ErrorCode.RESUME_BUSY, "token: the session cannot be taken now; come again"
_TOO_OFTEN = ErrorCode.RESUME_REFUSED, "the session was resumed too often"
_REFUSALS: Mapping[Reason, tuple[ErrorCode, str]] = {
    Reason.NOT_ALLOWED: (ErrorCode.RESUME_REFUSED, "token: it belongs to no session"),
    Reason.COPY_STALE: (ErrorCode.RESUME_STALE, "unit: the session has no such event"),
    Reason.UNKNOWN_SESSION: (ErrorCode.RESUME_LOST, "token: the session is lost"),
}
_LOST, _STALE = _REFUSALS[Reason.UNKNOWN_SESSION], _REFUSALS[Reason.COPY_STALE]


class _Found(NamedTuple):
    session: DuplexSession
    adoption: Adoption


class RemoteReturns:
    """Finds the session of a client at the workers, and runs it."""

    def __init__(
        self,
        sessions: SessionRegistry,
        fabric: FabricClient,
        limits: Limits,
        pool: str,
        clock: Clock,
    ) -> None:
        self._sessions = sessions
        self._fabric = fabric
        self._limits = limits
        self._pool = pool
        self._clock = clock
        self._count = 0
        self._failed = NetworkRates(_FAILED_PER_MINUTE / 60, _FAILED_PER_MINUTE)
        # By session id. Only clients with its token can cause that a session is counted.
        self._taken = NetworkRates(_TAKEN_PER_MINUTE / 60, _TAKEN_PER_MINUTE)

    async def run(
        self, client: SocketClient, asking: DuplexSession, request: ClientRequest
    ) -> None:
        """Serve the client of `asking`, which returns to another session, until it is gone."""
        resumes, returned = self._sessions.resumes, asking.returned
        if returned is None or not resumes.may_be_elsewhere(returned):
            await resumes.run(client, asking, request.caller)
            return
        async with contextlib.AsyncExitStack() as stack:
            with self._sessions.admitted(asking.dialect.mode, request) as refusal:
                found = _BUSY if refusal else await self._look(stack, asking, returned, request)
                if isinstance(found, _Found):
                    resumes.forget(returned)
                    mode = found.session.dialect.mode
                    await self._sessions.run(client, found.session, mode, request, found.adoption)
                    if not found.session.may_go_on_elsewhere:
                        found.adoption.is_safe.set()
                    return
        if found == _LOST and resumes.has(returned):  # no worker has newer events than this edge
            found = _STALE
        await resumes.refuse(client, asking, *found)

    async def _look(
        self,
        stack: contextlib.AsyncExitStack,
        asking: DuplexSession,
        returned: Return,
        request: ClientRequest,
    ) -> _Found | tuple[ErrorCode, str]:
        """Take the session, unless its client or the clients of its network return too often."""
        now_s, network = self._clock.now().monotonic_s, request.network
        if network and self._failed.wait_s(network, now_s):
            return _BUSY
        if self._taken.wait_s(returned.session_id, now_s):
            return _TOO_OFTEN
        found = await self._find(stack, asking, returned)
        if isinstance(found, _Found):
            self._taken.spend(returned.session_id, now_s)
        elif network and found != _BUSY:
            self._failed.spend(network, now_s)
        return found

    async def _find(
        self,
        stack: contextlib.AsyncExitStack,
        asking: DuplexSession,
        returned: Return,
    ) -> _Found | tuple[ErrorCode, str]:
        """Take the session from its worker, or return why that is not possible."""
        if self._count >= _AT_ONCE:
            return _BUSY
        attach = session_pb2.Attach(
            session_id=returned.session_id,
            token_secret=returned.secret,
            after_sequence=returned.unit if returned.unit >= 0 else None,
            client_sha256=asking.client_digest,
        )
        self._count += 1
        try:
            taking = self._fabric.take_session(attach, self._pool)
            taken = await stack.enter_async_context(taking)
            return self._restored(taken, asking, returned)
        except FabricError as error:
            _log.info("session %s is not taken: %s", returned.session_id, error)
            if error.field == "client_sha256":
                return OTHER_CLIENT
            return _REFUSALS.get(error.reason, _BUSY)
        except ValueError as error:
            _log.warning("session %s cannot be continued: %s", returned.session_id, error)
            return _LOST
        finally:
            self._count -= 1

    def _restored(
        self, taken: TakenSession, asking: DuplexSession, returned: Return
    ) -> _Found | tuple[ErrorCode, str]:
        """Return the session as it goes on here. Raises FabricError and ValueError."""
        note, now = EdgeNote.from_bytes(taken.attached.edge_note), self._clock.now()
        session = restored_session(note, self._limits, now, self._sessions.continuity)
        if not session.is_of_client_of(asking):
            return OTHER_CLIENT
        try:
            events = session.adopt(taken, note, returned, now)
        except BaseException:
            # Forget the copy and the events, which count in the bound of all sessions.
            session.end(GONE, now)
            raise
        return _Found(session, Adoption(events, taken.stream, taken.is_safe))
