"""The edge process: listens, gives each WebSocket its session, drains."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import resource
import signal
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import nullcontext
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from websockets.asyncio.server import Server, ServerConnection
from websockets.asyncio.server import serve as serve_websockets
from websockets.exceptions import ConnectionClosed

from duplane.edge.clock import Clock, LoopClock
from duplane.edge.dialects.dialect import Identity
from duplane.edge.ends import CLOSE_CODES, End, Ending
from duplane.edge.entry import Route, close_reason
from duplane.edge.front import Door, Front
from duplane.edge.http.application import application, refuse_upgrade
from duplane.edge.http.protocol import http_protocols
from duplane.edge.http.routes import edge_routes
from duplane.edge.modes import DEFAULT_MODE, MODES
from duplane.edge.peers import join_headers, parse_networks
from duplane.edge.places import PLACES, REFUSING, no_such_mode
from duplane.edge.recording.recorder import Recorder
from duplane.edge.sessions import Arrival, Sessions
from duplane.edge.settings import EdgeSettings
from duplane.edge.tls import Certificate
from duplane.edge.websocket import EdgeSocket
from duplane.fabric.client import FabricClient
from duplane.fabric.process import Shutdown, StartError, announce
from duplane.fabric.telemetry import Telemetry

_log = logging.getLogger(__name__)
_OTHER_FILES = 512  # of the fabric, of recordings, of the process itself
_QUEUED_FRAMES = 4  # per connection; above it the client is slowed down

# What the libraries say of handshakes, closings and bad requests is each client's own affair.
_websockets_log = logging.getLogger(f"{__name__}.websockets")
_websockets_log.setLevel(logging.CRITICAL)
_http_log = logging.getLogger(f"{__name__}.http")
_http_log.addFilter(lambda record: not _is_client_fault(record))


def _is_client_fault(record: logging.LogRecord) -> bool:
    return bool(record.exc_info) and isinstance(record.exc_info[1], HttpProcessingError)


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
    """One process that listens, and the sessions that come of it."""

    def __init__(
        self, settings: EdgeSettings, fabric: FabricClient, telemetry: Telemetry, clock: Clock
    ) -> None:
        self.address = ""
        self._settings = settings
        self._clock = clock
        self.certificate: Certificate | None = None
        if settings.tls_cert and settings.tls_key:
            self.certificate = Certificate(settings.tls_cert, settings.tls_key)
        self._sessions = Sessions(settings, fabric, telemetry, clock)
        self._application = application(edge_routes(settings, fabric, self._sessions, clock))

    @classmethod
    @contextlib.asynccontextmanager
    async def listening(
        cls,
        settings: EdgeSettings,
        fabric: FabricClient,
        telemetry: Telemetry,
        clock: Clock | None = None,
    ) -> AsyncGenerator[Edge]:
        """Serve at `settings.listen` for the body of the `with`; what still runs then is told so.

        Raises StartError.
        """
        try:
            edge = cls(settings, fabric, telemetry, clock or LoopClock())
        except ValueError as error:
            raise StartError(str(error)) from None
        http = web.AppRunner(
            edge._application,
            handler_cancellation=True,  # a client that vanishes stops what it has asked for
            shutdown_timeout=settings.limits.close_s,
        )
        await http.setup()
        door = Door(settings.limits, parse_networks(settings.trusted_proxies))
        try:
            server = await edge._listen(http, door)
        except OSError as error:
            await http.cleanup()
            raise StartError(f"cannot listen on {settings.listen}: {error}") from None
        host = settings.listen.rpartition(":")[0]
        edge.address = f"{host}:{_bound_port(server)}"
        recorder = Recorder(settings.recording, edge._clock) if settings.recording else None
        edge._sessions.recorder = recorder
        try:
            async with edge.certificate.kept_fresh() if edge.certificate else nullcontext():
                yield edge
        finally:
            await edge._sessions.end_all(settings.limits.close_s)
            server.close()
            for front in set(door.undecided):
                front.cut()
            await http.cleanup()
            await server.wait_closed()
            await edge.idle()  # whoever was cut has ended, too: until then recordings grow
            if recorder:
                await asyncio.to_thread(recorder.close)

    async def _listen(self, http: web.AppRunner, door: Door) -> Server:
        limits = self._settings.limits
        host, _, port = self._settings.listen.rpartition(":")
        server = await serve_websockets(
            self._serve_socket,
            host.strip("[]"),
            int(port),
            process_request=functools.partial(
                refuse_upgrade, chat_message_bytes=limits.chat_message_bytes
            ),
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
        await self._sessions.drain()

    async def idle(self) -> None:
        """Wait until no session is left."""
        await self._sessions.idle()

    async def _serve_socket(self, socket: ServerConnection) -> None:
        """Run one WebSocket to its end. The root of its task: our own faults stop here."""
        assert isinstance(socket, EdgeSocket)
        arrival = _arrival(socket)
        identity = self._sessions.new_identity(arrival)
        try:
            await self._admit(socket, arrival, identity)
        except Exception:  # noqa: BLE001 - the root of a task
            _log.exception("session %s failed", identity.session_id)
            await socket.close(CLOSE_CODES[End.FAILED], "internal error")

    async def _admit(self, socket: EdgeSocket, arrival: Arrival, identity: Identity) -> None:
        entry = arrival.entry
        place = PLACES.get((entry.route, entry.mode))
        if place is None:
            await self._refuse(socket, identity, entry.route, no_such_mode(entry.mode))
            return
        with self._sessions.admitted(place.mode, arrival) as refusal:
            if refusal:
                await self._refuse(socket, identity, entry.route, refusal)
            else:
                session = place.begin(identity, self._settings.limits, self._clock.now())
                await self._sessions.run(socket, session, place.mode, arrival)

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


def _arrival(socket: EdgeSocket) -> Arrival:
    assert socket.request
    connected: tuple[str, ...] | None = socket.remote_address
    headers = join_headers(socket.request.headers.raw_items())
    return Arrival(socket.request.path, headers, connected[0] if connected else "")


def _fronted(door: Door, http: web.AppRunner) -> Any:
    """Return what makes each connection's first protocol, in place of a WebSocket's own."""
    assert http.server
    speak_http = http_protocols(
        http.server,
        access_log=None,
        logger=_http_log,
        auto_decompress=False,  # nobody compresses what is taken here
        lingering_time=door.limits.close_s,
    )

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
