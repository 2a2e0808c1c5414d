"""The edge process: starts its parts, listens, and drains."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path

from duplane.edge.access import Authenticator
from duplane.edge.clock import Clock, LoopClock
from duplane.edge.credentials.authenticator import CredentialAuthenticator
from duplane.edge.http.access_control import AccessControl
from duplane.edge.http.application import application
from duplane.edge.http.page_routes import ca_route
from duplane.edge.http.routes import edge_routes
from duplane.edge.listener import Listener
from duplane.edge.metrics import EdgeMetrics
from duplane.edge.recording.recorder import Recorder
from duplane.edge.recording.storage import prepare
from duplane.edge.session_registry import SessionRegistry
from duplane.edge.settings import EdgeSettings
from duplane.edge.start_check import check_start, is_public
from duplane.edge.transport.certificate_names import CertificateNames
from duplane.edge.transport.client_address import parse_networks
from duplane.edge.transport.client_protocol import ConnectionLimiter
from duplane.edge.transport.collection_time import CollectionTime
from duplane.edge.transport.origins import BrowserRules
from duplane.edge.transport.rate_limit import request_rates
from duplane.edge.transport.self_signed import SelfSigned, ensure, own_names
from duplane.edge.transport.tls import Certificate
from duplane.edge.watching.feed import WatchFeed
from duplane.fabric.addresses import parse_address
from duplane.fabric.client import FabricClient
from duplane.fabric.exposure import warned_hourly
from duplane.fabric.monitoring.certificates import observe_certificates
from duplane.fabric.monitoring.health import reported_health
from duplane.fabric.monitoring.publication import published
from duplane.fabric.monitoring.spans import Telemetry
from duplane.fabric.process import Shutdown, StartError, announce
from duplane.fabric.secret_files import read_secret
from duplane.fabric.tls.credentials import open_credentials
from duplane.fabric.tls.identity import Role
from duplane.fabric.watched_files import WatchedFiles
from duplane.fabric.watched_files import watching as watching_files

_log = logging.getLogger(__name__)
_OPERATOR_CONNECTIONS = 64  # of the listener of operators, in total; further ones are cut
_OTHER_FILES = 512  # open files that are not connections of clients


async def serve(settings: EdgeSettings, shutdown: Shutdown) -> None:
    """Run one edge until `shutdown` is requested, then drain it."""
    credentials = settings.credentials
    if settings.reuse_port and credentials.are_required and not credentials.token_key_file:
        _log.warning(
            "each edge at this port accepts only its own ephemeral tokens: give all of them the"
            " same --token-key-file"
        )
    if settings.admin_token:
        _log.warning(
            "--admin-token can be read by other users of this machine, and the next release removes"
            " it: use --admin-token-file"
        )
    if settings.behind_tls_proxy and not settings.trusted_proxies:
        _log.warning(
            "--behind-tls-proxy without --trusted-proxies: all clients of the proxy count as one"
            " address, so limits and failed logins of one client apply to all; name the proxy in"
            " --trusted-proxies"
        )
    warning = await check_start(settings)
    if not settings.credentials.are_required and not await is_public(settings):
        _log.info("only this machine can connect: clients need no credential")
    make_room(settings.limits.connection_count)
    credentials = open_credentials(settings.fabric, Role.EDGE)
    fabric_files = credentials.watched_files if credentials else ()
    telemetry = Telemetry("edge")
    try:
        async with (
            reported_health("edge", settings.health_listen, shutdown) as health,
            warned_hourly(warning),
            FabricClient(settings.schedulers, credentials) as fabric,
            watching_files(fabric_files),
            Edge.listening(settings, fabric, telemetry) as edge,
            published(edge.metrics.registry, settings.metrics_listen),
        ):
            clients = edge.certificate
            observe_certificates(
                edge.metrics.registry,
                {
                    "fabric": lambda: credentials.leaf if credentials else None,
                    "clients": lambda: clients.leaf if clients else None,
                },
            )
            reload_asked = asyncio.Event()
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload_asked.set)
            reloading = asyncio.create_task(edge.reload_on(reload_asked, fabric_files))
            try:
                health.start()
                announce("edge", edge.address)
                await shutdown.wait()
                await edge.drain()
            finally:
                reloading.cancel()
                await asyncio.wait({reloading})
    finally:
        telemetry.shutdown()


class Edge:
    """One edge process: its listening sockets and its sessions.

    `operator_address` is empty if operators are served at `address`. `routes` are those of both.
    """

    def __init__(
        self,
        settings: EdgeSettings,
        fabric: FabricClient,
        telemetry: Telemetry,
        clock: Clock,
        authenticator: Authenticator | None,
    ) -> None:
        self.address = ""
        self.operator_address = ""
        self._settings = settings
        self._clock = clock
        self.certificate: Certificate | None = None
        chain, key = settings.tls_cert, settings.tls_key
        self_signed = _self_signed(settings)
        if self_signed:
            chain, key = self_signed.chain, self_signed.key
        if chain and key:
            self.certificate = Certificate(chain, key)
        if settings.recording:
            prepare(settings.recording.directory)
        self._sessions = SessionRegistry(settings, fabric, telemetry, clock)
        token_file = settings.admin_token_file
        admin_token = (
            read_secret(token_file, "admin_token_file") if token_file else settings.admin_token
        )
        self._credentials = CredentialAuthenticator(
            settings.credentials, admin_token, clock, is_behind_proxy=settings.behind_tls_proxy
        )
        self.metrics.observe_tenants(
            lambda: self._credentials.refused_count,
            lambda: self._sessions.tenant_counts(self._credentials.tenants),
        )
        self.metrics.observe_recordings(self._stopped_recordings)
        self._watch_feed = WatchFeed(fabric, self.metrics.figures, self._sessions.facts, clock)
        self.routes = edge_routes(
            settings, fabric, self._sessions, clock, self._credentials, self._watch_feed
        )
        if self_signed:
            self.routes.append(ca_route(self_signed.ca))
        self._proxies = parse_networks(settings.trusted_proxies)
        self._control = AccessControl(
            authenticator or self._credentials,
            _browser_rules(settings, chain),
            self._proxies,
            request_rates(settings.limits.client_requests_per_s),
            settings.log_addresses,
            # Browsers would then refuse plain http:// for all ports of the same host name.
            pins_tls=self_signed is None,
        )

    @classmethod
    @contextlib.asynccontextmanager
    async def listening(
        cls,
        settings: EdgeSettings,
        fabric: FabricClient,
        telemetry: Telemetry,
        clock: Clock | None = None,
        authenticator: Authenticator | None = None,
    ) -> AsyncGenerator[Edge]:
        """Serve at `settings.listen` during the body of the `with`; then end the running sessions.

        Without an `authenticator` the settings say which credentials are accepted. Raises
        StartError.
        """
        try:
            edge = cls(settings, fabric, telemetry, clock or LoopClock(), authenticator)
        except ValueError as error:
            raise StartError(str(error)) from None
        async with contextlib.AsyncExitStack() as stack:
            collections = stack.enter_context(CollectionTime().counted())
            stack.push_async_callback(edge._close_recorder)
            if settings.recording:
                edge._sessions.recorder = Recorder(settings.recording, edge._clock)
            await edge._listen(stack, collections)
            watching = asyncio.create_task(edge._sessions.watch_workers())
            try:
                async with (
                    watching_files(edge.watched_files),
                    edge._credentials.running(edge._end_invalid_sessions),
                ):
                    yield edge
            finally:
                watching.cancel()
                await asyncio.wait({watching})
                await edge._watch_feed.close()
                await edge._sessions.end_all(settings.limits.close_s)

    async def _listen(self, stack: contextlib.AsyncExitStack, collections: CollectionTime) -> None:
        """Listen until the stack is closed. Raises StartError."""
        settings, limits = self._settings, self._settings.limits
        tls = self.certificate.context if self.certificate else None
        limiter = ConnectionLimiter(limits, self._proxies)
        self.metrics.observe_connections(lambda: limiter.counts)
        address = parse_address(settings.listen, "listen", min_port=0)
        clients = Listener(address, limits, limiter, collections, tls, settings.reuse_port)
        has_operators = not settings.operator_listen
        control = replace(self._control, has_operators=has_operators)
        self.address = await stack.enter_async_context(
            clients.serving(application(self.routes, control))
        )
        if has_operators:
            return
        address = parse_address(settings.operator_listen, "operator_listen", min_port=0)
        few = replace(limits, connection_count=_OPERATOR_CONNECTIONS)
        limiter = ConnectionLimiter(few, self._proxies)
        tls = None if address.is_loopback else tls
        operators = Listener(address, limits, limiter, collections, tls)
        self.operator_address = await stack.enter_async_context(
            operators.serving(application(self.routes, self._control))
        )
        _log.info("operators are served at %s", self.operator_address)

    def _stopped_recordings(self) -> int:
        recorder = self._sessions.recorder
        return recorder.stopped_count if recorder else 0

    async def _close_recorder(self) -> None:
        await self.idle()  # sessions write to recordings until they end
        if recorder := self._sessions.recorder:
            await asyncio.to_thread(recorder.close)

    async def reload(self) -> None:
        """Read the certificate and the files of keys again. End sessions whose key has ended."""
        for files in self.watched_files:
            files.reload()
        await self._credentials.reload()
        self._end_invalid_sessions()

    async def reload_on(self, asked: asyncio.Event, others: Sequence[WatchedFiles] = ()) -> None:
        """Reload, with `others`, whenever `asked` is set, until cancelled."""
        while True:
            await asked.wait()
            asked.clear()
            for files in others:
                files.reload()
            await self.reload()

    def _end_invalid_sessions(self) -> None:
        self._sessions.end_invalid(self._credentials.problem)
        self._watch_feed.end_invalid(self._credentials.problem)

    @property
    def watched_files(self) -> Sequence[WatchedFiles]:
        """The files that this edge reads again when they change."""
        return (self.certificate,) if self.certificate else ()

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


def _self_signed(settings: EdgeSettings) -> SelfSigned | None:
    if not settings.tls_self_signed:
        return None
    own = parse_address(settings.listen, "listen", min_port=0).host
    return ensure(settings.tls_state, own_names([own, *settings.allowed_hosts]))


def _browser_rules(settings: EdgeSettings, chain: Path | None) -> BrowserRules:
    """Return the rules for browsers. The operator has chosen also the host name in `listen`."""
    own = parse_address(settings.listen, "listen", min_port=0).host
    hosts = (*settings.allowed_hosts, own)
    return BrowserRules(settings.allowed_origins, hosts, CertificateNames(chain))
