"""The edge process: listens, gives each WebSocket its session, drains."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import secrets
import signal
import socket
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import nullcontext
from typing import Any, cast

from aiohttp import web
from websockets.asyncio.server import Server, ServerConnection
from websockets.asyncio.server import serve as serve_websockets
from websockets.exceptions import ConnectionClosed

from duplane.edge.assets import load_assets
from duplane.edge.chat_connection import ChatConnection
from duplane.edge.chat_session import ChatSession
from duplane.edge.clock import Clock, LoopClock
from duplane.edge.connection import Connection
from duplane.edge.dialects.dialect import Identity
from duplane.edge.ends import CLOSE_CODES, End, Ending
from duplane.edge.entry import Route, close_reason, read_entry
from duplane.edge.front import Door, Front, HttpFactory
from duplane.edge.http import HttpAnswers
from duplane.edge.modes import DEFAULT_MODE, MODES, Mode
from duplane.edge.peers import identify, join_headers, parse_networks
from duplane.edge.places import PLACES, REFUSING
from duplane.edge.recording.recorder import Recorder, Recording
from duplane.edge.session import Session
from duplane.edge.settings import EdgeSettings
from duplane.edge.spans import SessionSpans
from duplane.edge.tls import Certificate
from duplane.edge.websocket import EdgeSocket
from duplane.fabric.client import FabricClient
from duplane.fabric.process import Shutdown, StartError, announce
from duplane.fabric.telemetry import Telemetry
from duplane.fabric.v1 import lease_pb2

_log = logging.getLogger(__name__)
_OTHER_FILES = 512  # of the fabric, of recordings, of the process itself
_QUEUED_FRAMES = 4  # per connection; above it the client is slowed down

# What the library says of handshakes and closings is each client's own affair.
_websockets_log = logging.getLogger(f"{__name__}.websockets")
_websockets_log.setLevel(logging.CRITICAL)


async def serve(settings: EdgeSettings, shutdown: Shutdown) -> None:
    """Run one edge until `shutdown` and the end of its drain."""
    make_room(settings.limits.connection_count)
    telemetry = Telemetry("edge")
    try:
        async with (
            FabricClient(settings.schedulers) as fabric,
            Edge.listening(settings, fabric, telemetry) as edge,
        ):
            if edge.certificate:
                loop = asyncio.get_running_loop()
                loop.add_signal_handler(signal.SIGHUP, edge.certificate.reload)
            announce("edge", edge.address)
            await shutdown.wait()
            await edge.drain()
    finally:
        telemetry.shutdown()


class Edge:
    """Every session of one process."""

    def __init__(
        self, settings: EdgeSettings, fabric: FabricClient, telemetry: Telemetry, clock: Clock
    ) -> None:
        self.address = ""
        self._settings = settings
        self._fabric = fabric
        self._telemetry = telemetry
        self._clock = clock
        self._connections: set[Connection] = set()
        self._sites: Counter[str] = Counter()  # sessions by client
        self._proxies = parse_networks(settings.trusted_proxies)
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self.certificate: Certificate | None = None
        if settings.tls_cert and settings.tls_key:
            self.certificate = Certificate(settings.tls_cert, settings.tls_key)
        assets = load_assets(settings.default_voice, settings.presets)
        self._http = HttpAnswers(fabric, settings, assets, lambda: len(self._connections))
        self._last_realtime_ms = 0
        self._recorder: Recorder | None = None

    @classmethod
    @contextlib.asynccontextmanager
    async def listening(
        cls,
        settings: EdgeSettings,
        fabric: FabricClient,
        telemetry: Telemetry,
        clock: Clock | None = None,
    ) -> AsyncGenerator[Edge]:
        """Serve at `settings.listen` for the body of the `with`; what still runs then is cut.

        Raises StartError.
        """
        try:
            edge = cls(settings, fabric, telemetry, clock or LoopClock())
        except ValueError as error:
            raise StartError(str(error)) from None
        http = web.AppRunner(
            edge._http.application(),
            access_log=None,
            shutdown_timeout=settings.limits.close_s,
            lingering_time=settings.limits.close_s,
        )
        await http.setup()
        door = Door(settings.limits, edge._proxies)
        try:
            server = await edge._listen(http, door)
        except OSError as error:
            await http.cleanup()
            raise StartError(f"cannot listen on {settings.listen}: {error}") from None
        host = settings.listen.rpartition(":")[0]
        edge.address = f"{host}:{_bound_port(server)}"
        edge._recorder = Recorder(settings.recording, edge._clock) if settings.recording else None
        try:
            async with edge.certificate.kept_fresh() if edge.certificate else nullcontext():
                yield edge
        finally:
            server.close()
            for front in set(door.undecided):
                front.cut()
            await http.cleanup()
            await server.wait_closed()
            if edge._recorder:
                await asyncio.to_thread(edge._recorder.close)

    async def _listen(self, http: web.AppRunner, door: Door) -> Server:
        limits = self._settings.limits
        host, _, port = self._settings.listen.rpartition(":")
        server = await serve_websockets(
            self._serve_socket,
            host.strip("[]"),
            int(port),
            process_request=self._http.refuse_upgrade,
            create_connection=_fronted(door, http),
            open_timeout=limits.handshake_s,
            compression=None,  # deflating an answer costs more than everything else together
            server_header=None,
            max_size=limits.message_bytes,
            max_queue=_QUEUED_FRAMES,
            ping_interval=limits.ping_s,
            ping_timeout=limits.ping_s,
            close_timeout=limits.close_s,
            logger=_websockets_log,
            reuse_port=self._settings.reuse_port or None,
            **self._tls(),
        )
        for listening in server.sockets:
            _bound_silence(listening, limits.ping_s)
        return server

    def _tls(self) -> dict[str, Any]:
        if self.certificate is None:
            return {}
        limits = self._settings.limits
        return {
            "ssl": self.certificate.context,
            "ssl_handshake_timeout": limits.handshake_s,
            "ssl_shutdown_timeout": limits.close_s,
        }

    async def drain(self) -> None:
        """Take no new sessions, end those in the queue, give the rest their time, end them too."""
        self._http.is_draining = True
        for connection in set(self._connections):
            if not connection.session.is_running:
                connection.end(Ending(End.SHUTDOWN))
        limits = self._settings.limits
        if not await self._idle_within(limits.drain_s):
            for connection in set(self._connections):
                connection.end(Ending(End.SHUTDOWN))
            await self._idle_within(limits.send_s + limits.close_s)

    async def idle(self) -> None:
        """Wait until no session is left."""
        await self._is_idle.wait()

    async def _idle_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.idle()
        return self._is_idle.is_set()

    async def _serve_socket(self, socket: ServerConnection) -> None:
        """Run one WebSocket to its end. The root of its task: our own faults stop here."""
        assert isinstance(socket, EdgeSocket)
        identity = self._new_identity(socket)
        try:
            await self._admit(socket, identity)
        except Exception:  # noqa: BLE001 - the root of a task
            _log.exception("session %s failed", identity.session_id)
            await socket.close(CLOSE_CODES[End.FAILED], "internal error")

    async def _admit(self, socket: EdgeSocket, identity: Identity) -> None:
        assert socket.request
        headers = join_headers(socket.request.headers.raw_items())
        entry = read_entry(socket.request.path, headers)
        place = PLACES.get((entry.route, entry.mode))
        if place is None:
            ending = Ending(End.MODE_REFUSED, f"Unsupported realtime mode: {entry.mode}")
            await self._refuse(socket, identity, entry.route, ending)
        elif self._http.is_draining:
            ending = Ending(End.SERVICE_UNAVAILABLE, "shutting down")
            await self._refuse(socket, identity, entry.route, ending)
        elif len(self._connections) >= self._settings.limits.session_count:
            ending = Ending(End.SERVICE_UNAVAILABLE, "too many sessions")
            await self._refuse(socket, identity, entry.route, ending)
        else:
            with self._counted(self._site(socket, headers)) as is_admitted:
                if is_admitted:
                    session = place.begin(identity, self._settings.limits, self._clock.now())
                    await self._run(socket, session, place.mode, entry.client_id)
                else:
                    ending = Ending(End.SERVICE_UNAVAILABLE, "too many sessions of one client")
                    await self._refuse(socket, identity, entry.route, ending)

    def _site(self, socket: EdgeSocket, headers: Mapping[str, str]) -> str:
        """Return what counts as the client of a connection."""
        connected: tuple[str, ...] | None = socket.remote_address
        return identify(connected[0] if connected else "", headers, self._proxies).site

    @contextlib.contextmanager
    def _counted(self, site: str) -> Generator[bool]:
        """Count a session of a client for the body of the `with`, unless it has too many."""
        if self._sites[site] >= self._settings.limits.client_session_count:
            yield False
            return
        self._sites[site] += 1
        try:
            yield True
        finally:
            self._sites[site] -= 1
            if not self._sites[site]:
                del self._sites[site]

    async def _refuse(
        self, socket: EdgeSocket, identity: Identity, route: Route, ending: Ending
    ) -> None:
        """Close after accepting: a refused upgrade would hide code and reason from browsers."""
        dialect = REFUSING[route](identity, self._settings.limits, MODES[DEFAULT_MODE])
        told = dialect.ended(ending, self._clock.now())
        with contextlib.suppress(ConnectionClosed):
            for event in told:
                await socket.send(event, text=True)
        await socket.close(dialect.close_code(ending), close_reason(ending.message))

    async def _run(self, socket: EdgeSocket, session: Session, mode: Mode, client_id: str) -> None:
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
            client_id=client_id,
            trace=spans.context,
        )
        recording = connection.recording = self._record(socket, identity)
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

    def _record(self, socket: EdgeSocket, identity: Identity) -> Recording | None:
        """Begin to record, if this session was found to be recorded."""
        if self._recorder is None or not identity.recording_id or socket.request is None:
            return None
        path = socket.request.path
        entry = read_entry(path, join_headers(socket.request.headers.raw_items()))
        known = {"client_id": entry.client_id, "realtime_id": identity.realtime_id}
        return self._recorder.begin(
            identity.recording_id, path, entry.mode, known, self._clock.now()
        )

    def _new_identity(self, socket: EdgeSocket) -> Identity:
        """Name a session. A's form is a time in milliseconds: two in one get neighbouring ones."""
        self._last_realtime_ms = max(
            self._clock.now().wall_ns // 1_000_000, self._last_realtime_ms + 1
        )
        session_id = f"sess_{secrets.token_hex(6)}"
        settings = self._settings.recording
        is_recorded = settings and socket.request and settings.is_wanted(socket.request.path)
        return Identity(
            session_id, f"rt_{self._last_realtime_ms}", session_id if is_recorded else ""
        )


def _fronted(door: Door, http: web.AppRunner) -> Any:
    """Return what makes each connection's first protocol, in place of a WebSocket's own."""
    assert http.server
    speak_http = cast(HttpFactory, http.server)

    def front(*arguments: Any, **settings: Any) -> Front:
        def speak_websocket(on_lost: Callable[[], None]) -> EdgeSocket:
            return EdgeSocket(*arguments, limits=door.limits, on_lost=on_lost, **settings)

        return Front(door, speak_websocket, speak_http)

    return front


def make_room(connection_count: int) -> None:
    """Let this process have a file for every connection, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connection_count + _OTHER_FILES
    if resource.RLIM_INFINITY != soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        if allowed < wanted:
            _log.warning(
                "the system allows %d open files; %d connections may need %d",
                *(allowed, connection_count, wanted),
            )


def _bound_silence(listening: socket.socket, within_s: float) -> None:
    """Let the kernel end connections whose peer acknowledges nothing: it may be gone for ever.

    What is accepted inherits it. Only Linux has it; elsewhere our own alarms are all there is.
    """
    if option := getattr(socket, "TCP_USER_TIMEOUT", None):
        listening.setsockopt(socket.IPPROTO_TCP, option, max(1, round(within_s * 1e3)))


def _bound_port(server: Server) -> int:
    return int(next(iter(server.sockets)).getsockname()[1])
