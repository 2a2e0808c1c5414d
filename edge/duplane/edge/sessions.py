"""Every session of one process: whether it may begin, what it is called, how it is kept, its end.

Knows nothing of ports: whoever listens brings a socket and the session that is to run on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import uuid
from collections import Counter
from collections.abc import Generator, Mapping
from dataclasses import dataclass

from duplane.edge.apps import Apps
from duplane.edge.chat_connection import ChatConnection
from duplane.edge.chat_session import ChatSession
from duplane.edge.clock import Clock
from duplane.edge.connection import Connection, Socket
from duplane.edge.dialects.dialect import Identity
from duplane.edge.ends import End, Ending
from duplane.edge.entry import Entry, read_entry
from duplane.edge.modes import Mode
from duplane.edge.peers import identify, parse_networks
from duplane.edge.recording.recorder import Recorder, Recording
from duplane.edge.session import Session
from duplane.edge.settings import EdgeSettings
from duplane.edge.spans import SessionSpans
from duplane.fabric.client import FabricClient
from duplane.fabric.telemetry import Telemetry
from duplane.fabric.v1 import lease_pb2

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Arrival:
    """Who comes, and where to: the path with its query, headers by lower-case name."""

    path: str
    headers: Mapping[str, str]
    address: str

    @property
    def entry(self) -> Entry:
        """What the client says of itself."""
        return read_entry(self.path, self.headers)


class Sessions:
    """`recorder` is set by whoever closes it."""

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
        self._proxies = parse_networks(settings.trusted_proxies)
        self._connections: set[Connection] = set()
        self._sites: Counter[str] = Counter()  # sessions by client
        self._admitted_count = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._last_realtime_ms = 0

    @property
    def count(self) -> int:
        """How many run."""
        return len(self._connections)

    async def drain(self) -> None:
        """Take no new sessions, end those in the queue, give the rest their time, end them too."""
        self.is_draining = True
        for connection in set(self._connections):
            connection.drain()
        limits = self._settings.limits
        if not await self._idle_within(limits.drain_s):
            await self.end_all(limits.send_s + limits.close_s)

    async def end_all(self, within_s: float) -> None:
        """Tell every client that it is over, and wait a little for them to have read it."""
        self.is_draining = True
        for connection in set(self._connections):
            connection.end(Ending(End.SHUTDOWN))
        await self._idle_within(within_s)

    async def idle(self) -> None:
        """Wait until no session is left."""
        await self._is_idle.wait()

    async def _idle_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.idle()
        return self._is_idle.is_set()

    @contextlib.contextmanager
    def admitted(self, mode: Mode, arrival: Arrival) -> Generator[Ending | None]:
        """Count a session for the body of the `with`, or give it the ending that refuses it."""
        site = identify(arrival.address, arrival.headers, self._proxies).site
        refusal = self._refusal(mode, site)
        if refusal:
            yield refusal
            return
        self._admitted_count += 1
        self._sites[site] += 1
        try:
            yield None
        finally:
            self._admitted_count -= 1
            self._sites[site] -= 1
            if not self._sites[site]:
                del self._sites[site]

    def _refusal(self, mode: Mode, site: str) -> Ending | None:
        limits = self._settings.limits
        if is_off := self.apps.refusal(mode.request_type):
            return Ending(End.MODE_REFUSED, is_off)
        if self.is_draining:
            return Ending(End.SERVICE_UNAVAILABLE, "shutting down")
        if self._admitted_count >= limits.session_count:
            return Ending(End.SERVICE_UNAVAILABLE, "too many sessions")
        if self._sites[site] >= limits.client_session_count:
            return Ending(End.SERVICE_UNAVAILABLE, "too many sessions of one client")
        return None

    def new_identity(self, arrival: Arrival) -> Identity:
        """Name a session. A's form is a time in milliseconds: two in one get neighbouring ones."""
        self._last_realtime_ms = max(
            self._clock.now().wall_ns // 1_000_000, self._last_realtime_ms + 1
        )
        session_id = f"sess_{secrets.token_hex(6)}"
        settings = self._settings.recording
        is_recorded = settings is not None and settings.is_wanted(arrival.path)
        return Identity(
            session_id, f"rt_{self._last_realtime_ms}", session_id if is_recorded else ""
        )

    async def run(self, socket: Socket, session: Session, mode: Mode, arrival: Arrival) -> None:
        """Run a session to its end and leave nothing behind."""
        limits, identity = self._settings.limits, session.identity
        spans = SessionSpans(self._telemetry, identity.session_id)
        connection = (
            ChatConnection(socket, session, limits, self._fabric, spans, self._clock)
            if isinstance(session, ChatSession)
            else Connection(socket, session, limits, self._fabric, spans, self._clock)
        )
        wish = lease_pb2.AcquireLeaseRequest(
            request_id=str(uuid.uuid4()),
            kind=mode.kind,
            pool=self._settings.pool,
            session_id=identity.session_id,
            client_id=arrival.entry.client_id,
            trace=spans.context,
        )
        recording = connection.recording = self._record(arrival, identity)
        began = self._clock.now()
        self._connections.add(connection)
        self._is_idle.clear()
        try:
            await connection.run(wish)
        finally:
            self._connections.discard(connection)
            if not self._connections:
                self._is_idle.set()
            outcome = session.farewell.end if session.farewell else End.FAILED
            if recording:
                recording.end(session.dialect.name, outcome, self._clock.now())
            spans.end(session.dialect.name, outcome, is_failure=outcome is End.FAILED)
            _log.info(
                "session %s (%s, dialect %s) ended after %.1f s: %s",
                *(identity.session_id, identity.realtime_id, session.dialect.name),
                *(self._clock.now().monotonic_s - began.monotonic_s, outcome),
            )

    def _record(self, arrival: Arrival, identity: Identity) -> Recording | None:
        """Begin to record, if this session was found to be recorded."""
        if self.recorder is None or not identity.recording_id:
            return None
        entry = arrival.entry
        known = {"client_id": entry.client_id, "realtime_id": identity.realtime_id}
        return self.recorder.begin(
            identity.recording_id, arrival.path, entry.mode, known, self._clock.now()
        )
