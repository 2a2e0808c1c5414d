"""Admits, names, runs and drains the sessions of one process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator
from dataclasses import dataclass

from aiohttp import web

from duplane.edge.access import Caller, CallerKind, caller_of, client_address
from duplane.edge.clock import Clock
from duplane.edge.close import Close, CloseReason
from duplane.edge.content.apps import Apps
from duplane.edge.credentials.carriers import without_token
from duplane.edge.credentials.keys import OTHER_TENANTS
from duplane.edge.hang_watch import HangWatch
from duplane.edge.identity import Identity
from duplane.edge.metrics import EdgeMetrics
from duplane.edge.modes import Mode
from duplane.edge.recording.recorder import Recorder, Recording
from duplane.edge.resumes import Resumes
from duplane.edge.routing import AnySession, Target, parse_target, parse_trace
from duplane.edge.session.chat_runner import ChatRunner
from duplane.edge.session.chat_session import ChatSession
from duplane.edge.session.continuity import NO_CONTINUITY, Continuity, RebuildPermits
from duplane.edge.session.duplex_runner import DuplexRunner
from duplane.edge.session.duplex_session import DuplexSession
from duplane.edge.session.returnable_runner import Adoption
from duplane.edge.session.runner import Client
from duplane.edge.settings import EdgeSettings
from duplane.edge.spans import SessionSpans
from duplane.edge.speech.scorers import open_scorers
from duplane.edge.transport.client_address import ClientAddress, join_headers
from duplane.edge.transport.client_limits import ClientLimiter, LimitReached
from duplane.fabric.client import FabricClient
from duplane.fabric.journal import Journal, JournalSpace, LossReason
from duplane.fabric.monitoring.logs import logged_ids
from duplane.fabric.monitoring.spans import Telemetry
from duplane.fabric.settings import parse_labels
from duplane.fabric.v1 import lease_pb2, trace_pb2

_log = logging.getLogger(__name__)

_FAILURES = (CloseReason.FAILED, CloseReason.WORKER_CONNECT_FAILED)  # the server's fault
_LIMIT_MESSAGES = {
    LimitReached.TOTAL: "too many sessions",
    LimitReached.CLIENT: "too many sessions of one client",
}


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """The request that opens a session."""

    path: str  # with its query, but without a token in it
    target: Target
    trace: trace_pb2.TraceContext
    client: ClientAddress
    caller: Caller

    @property
    def network(self) -> str | None:
        """The key by which limits per address count the session.

        None for a client of this machine or with a credential, to which no such limit applies.
        """
        is_exempt = self.client.is_direct or self.caller.kind is not CallerKind.ANONYMOUS
        return None if is_exempt else self.client.network


class SessionRegistry:
    """The running sessions and their limits.

    The server sets `recorder` and closes it.
    """

    def __init__(
        self, settings: EdgeSettings, fabric: FabricClient, telemetry: Telemetry, clock: Clock
    ) -> None:
        self.is_draining = False
        self.apps = Apps()
        self.recorder: Recorder | None = None
        self._settings = settings
        self._fabric = fabric
        self._telemetry = telemetry
        self._clock = clock
        self._runners: dict[DuplexRunner | ChatRunner, Caller] = {}
        limits = settings.limits
        self._limiter = ClientLimiter(limits.session_count, limits.client_session_count)
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._last_realtime_ms = 0
        self.metrics = EdgeMetrics(self._states, settings.playback_delay_ms / 1e3)
        journals = JournalSpace(
            limits.journal_bytes, limits.journal_total_bytes, limits.journal_windows
        )
        self.metrics.observe_journals(journals, self.unmovable_counts, self._journals)
        self.continuity = NO_CONTINUITY
        if settings.continuity == "worker":
            self.continuity = Continuity(journals, RebuildPermits(limits.rebuild_count))
        self.resumes = Resumes(self._runners, self.metrics, clock)
        journals.make_room = self.resumes.end_longest_parked
        self.scorers = open_scorers(settings.vad_model)
        telemetry.observe(self.metrics.registry)

    @property
    def count(self) -> int:
        """The number of running sessions."""
        return len(self._runners)

    def _states(self) -> Iterator[tuple[str, str]]:
        for runner in self._runners:
            session = runner.session
            yield session.dialect.name, "running" if session.is_running else "waiting"

    def facts(self) -> dict[str, object]:
        """Describe the sessions of this edge to operators: counts, without ids."""
        counts = Counter(self._states())
        return {
            "is_draining": self.is_draining,
            "sessions": [
                {"dialect": dialect, "state": state, "count": count}
                for (dialect, state), count in sorted(counts.items())
            ],
            "unmovable": self.unmovable_counts().total(),
            "approximate": self.approximate_count(),
        }

    def unmovable_counts(self) -> Counter[LossReason]:
        """Count the running sessions that can no longer move, by the reason."""
        losses = [journal.loss for journal in self._journals()]
        return Counter(loss.reason for loss in losses if loss)

    def approximate_count(self) -> int:
        """Count the running sessions that can move, but would not continue exactly."""
        return sum(journal.is_approximate for journal in self._journals())

    def _journals(self) -> list[Journal]:
        """Return the journals of all running duplex sessions."""
        sessions = [one.session for one in self._runners if isinstance(one, DuplexRunner)]
        return [one.moves.journal for one in sessions if one.closed is None]

    async def drain(self) -> None:
        """Refuse new sessions, and end waiting sessions immediately.

        Ask the clients of resumable sessions to go to another edge, one after the other. End
        running sessions after `drain_s`.
        """
        self.is_draining = True
        limits = self._settings.limits
        leaving = [
            runner
            for runner in self._runners
            if isinstance(runner, DuplexRunner) and runner.session.is_resumable
        ]
        # No client is asked to leave when its session has ended, or in the moment of its end.
        spread_s = min(limits.go_away_s, limits.drain_s / 2)
        for number, runner in enumerate(leaving, 1):
            runner.go_away(spread_s * number / len(leaving))
        for runner in self._runners.keys() - set(leaving):
            runner.drain()
        if not await self._idle_within(limits.drain_s):
            await self.end_all(limits.send_s + limits.close_s)

    def end(self, session_id: str) -> bool:
        """End a session for an operator; return False if this edge has no such session.

        `session_id` is the id of the session or, for a client of A, the id that the client knows.
        """
        for runner in self._runners:
            identity = runner.session.identity
            if session_id in (identity.session_id, identity.realtime_id):
                runner.end(Close(CloseReason.SHUTDOWN, "ended by an operator"))
                return True
        return False

    def end_invalid(self, problem: Callable[[Caller], str]) -> None:
        """End the sessions of callers for which `problem` says why they must end."""
        for runner, caller in list(self._runners.items()):
            if reason := problem(caller):
                runner.end(Close(CloseReason.CREDENTIAL_ENDED, reason))

    def tenant_counts(self, named: Collection[str]) -> Counter[str]:
        """Count the sessions of each tenant in `named`, and of all other tenants together."""
        tenants = (caller.tenant for caller in self._runners.values() if caller.tenant)
        counts = Counter(dict.fromkeys((*named, OTHER_TENANTS), 0))
        counts.update(tenant if tenant in counts else OTHER_TENANTS for tenant in tenants)
        return counts

    async def end_all(self, within_s: float) -> None:
        """End every session. Wait at most `within_s` for the clients to read the last events."""
        self.is_draining = True
        ended = set(self._runners)
        if ended:
            _log.warning("this edge stops and ends %d sessions", len(ended))
        for runner in ended:
            self.metrics.cut(runner.session.dialect.name)
            runner.end(Close(CloseReason.SHUTDOWN))
        await self._idle_within(within_s)

    async def watch_workers(self) -> None:
        """Move sessions away from workers that hang, until cancelled."""
        if self.continuity is NO_CONTINUITY:
            return

        def duplex_runners() -> list[DuplexRunner]:
            return [runner for runner in self._runners if isinstance(runner, DuplexRunner)]

        overdue_s = self._settings.limits.overdue_s
        await HangWatch(duplex_runners, self._fabric, overdue_s).run()

    async def idle(self) -> None:
        """Wait until no session is left."""
        await self._is_idle.wait()

    async def _idle_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.idle()
        return self._is_idle.is_set()

    def parse(self, request: web.Request) -> ClientRequest:
        """Parse the URL and the headers of a request."""
        path, headers = without_token(request.raw_path), join_headers(request.headers.items())
        return ClientRequest(
            path,
            parse_target(path, headers),
            parse_trace(path, headers),
            client_address(request),
            caller_of(request),
        )

    @contextlib.contextmanager
    def admitted(self, mode: Mode, request: ClientRequest) -> Generator[Close | None]:
        """Count a session during the body of the `with`.

        Yields None, or the close that refuses it.
        """
        with self._admitted(mode, request) as refusal:
            if refusal:
                self.metrics.refused(refusal.reason)
            yield refusal

    @contextlib.contextmanager
    def _admitted(self, mode: Mode, request: ClientRequest) -> Generator[Close | None]:
        if is_off := self.apps.refusal(mode.request_type):
            yield Close(CloseReason.MODE_REFUSED, is_off)
            return
        if self.is_draining:
            yield Close(CloseReason.SERVICE_UNAVAILABLE, "shutting down")
            return
        permit = self._limiter.acquire(request.network)
        if isinstance(permit, LimitReached):
            yield Close(CloseReason.SERVICE_UNAVAILABLE, _LIMIT_MESSAGES[permit])
            return
        try:
            yield None
        finally:
            permit.release()

    def new_identity(self, request: ClientRequest) -> Identity:
        """Return the ids of a new session.

        The id of dialect A is the time in milliseconds. This id is increased if another session has
        the same id.
        """
        self._last_realtime_ms = max(
            self._clock.now().wall_ns // 1_000_000, self._last_realtime_ms + 1
        )
        session_id = f"sess_{secrets.token_hex(6)}"
        settings = self._settings.recording
        may_record = request.caller.may_record
        is_recorded = settings is not None and settings.is_recorded(request.path, may_record)
        return Identity(
            session_id,
            f"rt_{self._last_realtime_ms}",
            session_id if is_recorded else "",
            may_be_recorded=settings is not None or may_record is not None,
            model=request.target.model,
            url_id=request.target.url_id,
            tenant=request.caller.tenant,
        )

    async def run(
        self,
        client: Client,
        session: AnySession,
        mode: Mode,
        request: ClientRequest,
        adoption: Adoption | None = None,
    ) -> None:
        """Run a session until it has ended and its slot, its recording and its span are closed.

        A session that replaces it runs after it, with the same client, recording and span. A
        session with an `adoption` goes on here; it is recorded only where it began.
        """
        session_id = session.identity.session_id
        spans = SessionSpans(self._telemetry, session_id, self._clock, request.trace)
        with logged_ids(session.identity.session_id, spans.context):
            await self._run(client, session, mode, request, spans, adoption)

    async def _run(
        self,
        client: Client,
        session: AnySession,
        mode: Mode,
        request: ClientRequest,
        spans: SessionSpans,
        adoption: Adoption | None,
    ) -> None:
        identity = session.identity
        lease_request = lease_pb2.AcquireLeaseRequest(
            request_id=str(uuid.uuid4()),
            kind=mode.kind,
            pool=self._settings.pool,
            needs=parse_labels(self._settings.needs, "needs"),
            model=request.target.model,
            session_id=identity.session_id,
            client_id=request.target.client_id,
            trace=spans.context,
            tenant_id=request.caller.tenant,
            tenant_limits=_limits_of(request.caller),
            # Whether the client may have it is not known before its settings come.
            wants_queue_token=isinstance(session, DuplexSession)
            and self._settings.limits.resume_s > 0,
        )
        recording = None if adoption else self._record(request, identity)
        began = self._clock.now()
        worker = ""
        self._is_idle.clear()
        try:
            while True:
                runner = self._new_runner(session, client, spans)
                runner.recording = recording
                if isinstance(runner, DuplexRunner):
                    runner.adoption = adoption
                self._runners[runner] = request.caller
                try:
                    await runner.run(lease_request)
                finally:
                    del self._runners[runner]
                    worker = runner.worker or worker
                successor = session.successor if isinstance(session, ChatSession) else None
                if session.closed or successor is None:
                    break
                session = successor
                lease_request.request_id = str(uuid.uuid4())
                lease_request.kind = session.dialect.mode.kind
        finally:
            if not self._runners:
                self._is_idle.set()
            close = session.closed or Close(CloseReason.FAILED, "internal error")
            outcome = close.reason
            if isinstance(session, DuplexSession):
                self.resumes.ended(session)
            if recording and outcome is CloseReason.RETURNED:
                recording.discard()
            elif recording:
                recording.end(session.dialect.name, outcome, self._clock.now())
            self.metrics.ended(session.dialect.name, outcome)
            spans.end(session.dialect.name, outcome, is_failure=outcome in _FAILURES)
            # If the server is at fault, operators need these facts: worker, cause, client address
            # and whose session it was.
            _log.log(
                logging.ERROR if outcome in _FAILURES else logging.INFO,
                "session %s (%s, dialect %s) of %s%s on worker %s ended after %.1f s: %s (%s)",
                identity.session_id,
                identity.realtime_id,
                session.dialect.name,
                request.client.logged(self._settings.log_addresses),
                request.caller.logged,
                worker or "none",
                self._clock.now().monotonic_s - began.monotonic_s,
                outcome,
                close.logged_text,
            )

    def _new_runner(
        self, session: AnySession, client: Client, spans: SessionSpans
    ) -> DuplexRunner | ChatRunner:
        limits = self._settings.limits
        parts = (client, limits, self._fabric, spans, self._clock, self.metrics)
        if isinstance(session, ChatSession):
            return ChatRunner(session, *parts)
        return DuplexRunner(session, *parts)

    def _record(self, request: ClientRequest, identity: Identity) -> Recording | None:
        """Begin the recording of a session whose identity has a recording id."""
        if self.recorder is None or not identity.recording_id:
            return None
        target, caller = request.target, request.caller
        verified = {"tenant": caller.tenant, "subject": caller.subject}
        ids = {
            "client_id": target.client_id,
            "realtime_id": identity.realtime_id,
            **{name: text for name, text in verified.items() if text},
        }
        return self.recorder.begin(
            identity.recording_id, request.path, target.mode, ids, self._clock.now()
        )


def _limits_of(caller: Caller) -> lease_pb2.TenantLimits:
    """Return the limits of a caller's tenant; absent fields mean unlimited."""
    limits = caller.limits
    return lease_pb2.TenantLimits(
        session_count=limits.session_count,
        waiting_count=limits.waiting_count,
        daily_minutes=limits.minutes,
    )
