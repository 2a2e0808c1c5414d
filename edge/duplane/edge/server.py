"""The edge process: starts its parts, listens, and drains."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import socket
from collections.abc import AsyncGenerator
from contextlib import nullcontext
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from duplane.edge.clock import Clock, LoopClock
from duplane.edge.http.application import application
from duplane.edge.http.routes import edge_routes
from duplane.edge.metrics import EdgeMetrics
from duplane.edge.recording.recorder import Recorder
from duplane.edge.recording.storage import prepare
from duplane.edge.session_registry import SessionRegistry
from duplane.edge.settings import EdgeSettings
from duplane.edge.transport.client_address import parse_networks
from duplane.edge.transport.client_protocol import ConnectionLimiter, client_protocols
from duplane.edge.transport.collection_time import CollectionTime
from duplane.edge.transport.tls import Certificate
from duplane.fabric.addresses import Address, parse_address
from duplane.fabric.client import FabricClient
from duplane.fabric.monitoring.publication import published
from duplane.fabric.monitoring.spans import Telemetry
from duplane.fabric.process import Shutdown, StartError, announce

_log = logging.getLogger(__name__)
_OTHER_FILES = 512  # open files that are not connections of clients

# Requests that cannot be parsed are not logged, since the clients are at fault.
_http_log = logging.getLogger(f"{__name__}.http")
_http_log.addFilter(lambda record: not _is_client_fault(record))


def _is_client_fault(record: logging.LogRecord) -> bool:
    return bool(record.exc_info) and isinstance(record.exc_info[1], HttpProcessingError)


async def serve(settings: EdgeSettings, shutdown: Shutdown) -> None:
    """Run one edge until `shutdown` is requested, then drain it."""
    make_room(settings.limits.connection_count)
    telemetry = Telemetry("edge")
    try:
        async with (
            FabricClient(settings.schedulers) as fabric,
            Edge.listening(settings, fabric, telemetry) as edge,
            published(edge.metrics.registry, settings.metrics_listen),
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
    """One edge process: its listening socket and its sessions."""

    def __init__(
        self, settings: EdgeSettings, fabric: FabricClient, telemetry: Telemetry, clock: Clock
    ) -> None:
        self.address = ""
        self._settings = settings
        self._clock = clock
        self.certificate: Certificate | None = None
        if settings.tls_cert and settings.tls_key:
            self.certificate = Certificate(settings.tls_cert, settings.tls_key)
        if settings.recording:
            prepare(settings.recording.directory)
        self._sessions = SessionRegistry(settings, fabric, telemetry, clock)
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
        """Serve at `settings.listen` during the body of the `with`; then end the running sessions.

        Raises StartError.
        """
        try:
            edge = cls(settings, fabric, telemetry, clock or LoopClock())
        except ValueError as error:
            raise StartError(str(error)) from None
        http = web.AppRunner(
            edge._application,
            handler_cancellation=True,  # a lost connection cancels its request
            shutdown_timeout=settings.limits.close_s,
        )
        await http.setup()
        with CollectionTime().counted() as collections:
            try:
                server = await edge._listen(http, collections)
            except OSError as error:
                await http.cleanup()
                raise StartError(f"cannot listen on {settings.listen}: {error}") from None
            host = parse_address(settings.listen, "listen", min_port=0).host
            edge.address = str(Address(host, _bound_port(server)))
            recorder = Recorder(settings.recording, edge._clock) if settings.recording else None
            edge._sessions.recorder = recorder
            watching = asyncio.create_task(edge._sessions.watch_workers())
            try:
                async with edge.certificate.watching() if edge.certificate else nullcontext():
                    yield edge
            finally:
                watching.cancel()
                await asyncio.wait({watching})
                await edge._sessions.end_all(settings.limits.close_s)
                server.close()
                await http.cleanup()
                await server.wait_closed()
                await edge.idle()  # sessions write to recordings until they end
                if recorder:
                    await asyncio.to_thread(recorder.close)

    async def _listen(self, http: web.AppRunner, collections: CollectionTime) -> asyncio.Server:
        settings = self._settings
        limits = self._settings.limits
        address = parse_address(settings.listen, "listen", min_port=0)
        assert http.server, "`setup` was called"
        limiter = ConnectionLimiter(limits, parse_networks(settings.trusted_proxies))
        self.metrics.observe_connections(lambda: limiter.counts)
        protocols = client_protocols(
            http.server,
            limits,
            limiter,
            collections,
            access_log=None,
            logger=_http_log,
            auto_decompress=False,  # compressed requests are not supported
        )
        server = await asyncio.get_running_loop().create_server(
            protocols,
            address.host,
            address.port,
            reuse_port=settings.reuse_port or None,
            **self._tls(),
        )
        for listening in server.sockets:
            _set_user_timeout(listening, limits.ping_s)
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

    @property
    def metrics(self) -> EdgeMetrics:
        """The metrics of this edge."""
        return self._sessions.metrics

    async def drain(self) -> None:
        """Refuse new sessions, and end waiting sessions immediately.

        End running sessions after `drain_s`.
        """
        await self._sessions.drain()

    async def idle(self) -> None:
        """Wait until no session is left."""
        await self._sessions.idle()


def make_room(connection_count: int) -> None:
    """Raise the limit of open files to fit `connection_count`, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connection_count + _OTHER_FILES
    if resource.RLIM_INFINITY != soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        if allowed < wanted:
            _log.warning(
                "the system allows %d open files; %d connections may need %d",
                allowed,
                connection_count,
                wanted,
            )


def _set_user_timeout(listening: socket.socket, timeout_s: float) -> None:
    """Let the kernel close connections whose peer acknowledges nothing for `timeout_s`.

    This sets an option of the listening socket, which accepted sockets inherit. Only Linux has this
    option; elsewhere the edge's own timeouts apply.
    """
    if option := getattr(socket, "TCP_USER_TIMEOUT", None):
        listening.setsockopt(socket.IPPROTO_TCP, option, max(1, round(timeout_s * 1e3)))


def _bound_port(server: asyncio.Server) -> int:
    return int(next(iter(server.sockets)).getsockname()[1])
