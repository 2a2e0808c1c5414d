"""Says whether this process lives, has started, and accepts work: over HTTP and to systemd.

The listener has no TLS and needs no credential, also beyond loopback, because the probes of an
orchestrator have neither. So its answers have no details: no address, name, number or cause.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from duplane.fabric.addresses import Address, parse_address
from duplane.fabric.monitoring.service_manager import service_manager, told
from duplane.fabric.process import Shutdown, StartError

if TYPE_CHECKING:
    from aiohttp import web

_log = logging.getLogger(__name__)
# Requests that cannot be parsed are not logged, since the clients are at fault.
_http_log = logging.getLogger(f"{__name__}.http")
_http_log.addFilter(lambda record: not _is_client_fault(record))
# A probe needs a connection for milliseconds. Nobody can keep probes out by holding connections: of
# more connections the oldest is cut, and each is cut after this time to twice this time.
MAX_CONNECTIONS = 64
CONNECTION_S = 5.0


def _always() -> bool:
    return True


class Health:
    """The health of one process. The process starts until `start` is called."""

    def __init__(self, role: str, shutdown: Shutdown) -> None:
        self.role = role
        self.shutdown = shutdown
        self.has_started = asyncio.Event()
        self._accepts: Callable[[], bool] = _always
        self._answers: Callable[[], bool] = _always

    def start(
        self, *, accepts: Callable[[], bool] = _always, answers: Callable[[], bool] = _always
    ) -> None:
        """Note that the process serves from now on.

        `accepts` tells whether it accepts new work, `answers` whether what it depends on inside
        this process answers, for example its device.
        """
        self._accepts = accepts
        self._answers = answers
        self.has_started.set()

    @property
    def is_started(self) -> bool:
        """True once the process has begun to serve."""
        return self.has_started.is_set()

    @property
    def is_live(self) -> bool:
        """False if only a restart helps. The event loop lives if it can call this."""
        return self._answers()

    @property
    def is_ready(self) -> bool:
        """True if the process accepts new work."""
        is_ending = self.shutdown.is_draining
        return self.is_started and not is_ending and self.is_live and self._accepts()

    @property
    def status(self) -> dict[str, str | bool]:
        """What `/status` answers."""
        return {
            "role": self.role,
            "live": self.is_live,
            "started": self.is_started,
            "ready": self.is_ready,
            "draining": self.shutdown.is_draining,
        }


@contextlib.asynccontextmanager
async def reported_health(role: str, listen: str, shutdown: Shutdown) -> AsyncGenerator[Health]:
    """Report the health of a process during the body of the `with`; yield it.

    It is served at `listen`, nowhere if this is empty, and told to systemd if systemd has started
    the process as a service that notifies. Raises StartError if the process cannot listen there.
    """
    health = Health(role, shutdown)
    async with contextlib.AsyncExitStack() as stack:
        if manager := service_manager():
            waits = (health.has_started.wait, shutdown.wait)
            await stack.enter_async_context(told(manager, *waits, lambda: health.is_live))
        if listen:
            url = await stack.enter_async_context(health_served(health, listen))
            _log.info("health at %s", url)
        yield health


@contextlib.asynccontextmanager
async def health_served(health: Health, listen: str) -> AsyncGenerator[str]:
    """Serve `health` at `listen` during the body of the `with`; yield the URL before the paths.

    Raises StartError if the process cannot listen there.
    """
    # Imported only here: this import takes a third of the time in which a scheduler starts.
    from aiohttp import web

    address = parse_address(listen, "health_listen", min_port=0)
    requests = web.Server(
        partial(_answer, health), access_log=None, logger=_http_log, lingering_time=0.0
    )
    try:
        server = await asyncio.get_running_loop().create_server(
            partial(_connection, requests), address.host, address.port
        )
    except OSError as error:
        raise StartError(f"cannot listen on {listen}: {error}") from None
    cutting = asyncio.create_task(_cut_old(requests))
    try:
        port = int(next(iter(server.sockets)).getsockname()[1])
        yield f"http://{Address(address.host, port)}"
    finally:
        cutting.cancel()
        server.close()
        await requests.shutdown(0.0)
        await server.wait_closed()


def _connection(requests: web.Server) -> asyncio.Protocol:
    """Return the protocol of a new connection, and cut the oldest ones above the bound."""
    connections = requests.connections
    for oldest in connections[: max(0, len(connections) + 1 - MAX_CONNECTIONS)]:
        oldest.force_close()
    return requests()


async def _cut_old(requests: web.Server) -> NoReturn:
    """Cut the connections that were open already at the previous round, until cancelled."""
    while True:
        old = requests.connections
        await asyncio.sleep(CONNECTION_S)
        for connection in old:
            connection.force_close()  # without effect if the connection has ended


async def _answer(health: Health, request: web.BaseRequest) -> web.Response:
    from aiohttp import web

    is_well = {
        "/livez": health.is_live,
        "/readyz": health.is_ready,
        "/startupz": health.is_started,
    }.get(request.path)
    if request.method not in ("GET", "HEAD"):
        response = web.Response(status=405, headers={"Allow": "GET, HEAD"})
    elif request.path == "/status":
        response = web.json_response(health.status)
    elif is_well is None:
        response = web.Response(status=404)
    else:
        response = web.Response(status=200 if is_well else 503, text="ok\n" if is_well else "no\n")
    response.headers["Cache-Control"] = "no-store"
    response.force_close()  # one request for each connection
    return response


def _is_client_fault(record: logging.LogRecord) -> bool:
    from aiohttp.http_exceptions import HttpProcessingError

    return bool(record.exc_info) and isinstance(record.exc_info[1], HttpProcessingError)
