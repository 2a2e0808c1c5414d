"""One listening socket of the edge, with the application that it serves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from duplane.edge.settings import Limits
from duplane.edge.transport.client_protocol import ConnectionLimiter, client_protocols
from duplane.edge.transport.collection_time import CollectionTime
from duplane.fabric.addresses import Address
from duplane.fabric.process import StartError

# Requests that cannot be parsed are not logged, since the clients are at fault.
_http_log = logging.getLogger(f"{__name__}.http")
_http_log.addFilter(lambda record: not _is_client_fault(record))


def _is_client_fault(record: logging.LogRecord) -> bool:
    return bool(record.exc_info) and isinstance(record.exc_info[1], HttpProcessingError)


@dataclass(frozen=True, slots=True)
class Listener:
    """Where and how an application is served. Without `tls` it is served in plain text."""

    address: Address
    limits: Limits
    limiter: ConnectionLimiter
    collections: CollectionTime
    tls: ssl.SSLContext | None = None
    reuse_port: bool = False

    @contextlib.asynccontextmanager
    async def serving(self, app: web.Application) -> AsyncGenerator[str]:
        """Serve `app` during the body of the `with`; yield the address. Raises StartError."""
        http = web.AppRunner(
            app,
            handler_cancellation=True,  # a lost connection cancels its request
            shutdown_timeout=self.limits.close_s,
        )
        await http.setup()
        try:
            server = await self._listen(http)
        except OSError as error:
            await http.cleanup()
            raise StartError(f"cannot listen on {self.address}: {error}") from None
        try:
            port = int(next(iter(server.sockets)).getsockname()[1])
            yield str(Address(self.address.host, port))
        finally:
            server.close()
            await http.cleanup()
            await server.wait_closed()

    async def _listen(self, http: web.AppRunner) -> asyncio.Server:
        if http.server is None:
            raise RuntimeError("`setup` was not called")
        protocols = client_protocols(
            http.server,
            self.limits,
            self.limiter,
            self.collections,
            access_log=None,
            logger=_http_log,
            auto_decompress=False,  # compressed requests are not supported
        )
        server = await asyncio.get_running_loop().create_server(
            protocols,
            self.address.host,
            self.address.port,
            reuse_port=self.reuse_port or None,
            **self._tls_settings(),
        )
        for listening in server.sockets:
            _set_user_timeout(listening, self.limits.ping_s)
        return server

    def _tls_settings(self) -> dict[str, Any]:
        if self.tls is None:
            return {}
        return {
            "ssl": self.tls,
            "ssl_handshake_timeout": self.limits.handshake_s,
            "ssl_shutdown_timeout": self.limits.close_s,
        }


def _set_user_timeout(listening: socket.socket, timeout_s: float) -> None:
    """Let the kernel close connections whose peer acknowledges nothing for `timeout_s`.

    This sets an option of the listening socket, which accepted sockets inherit. Only Linux has this
    option; elsewhere the edge's own timeouts apply.
    """
    if option := getattr(socket, "TCP_USER_TIMEOUT", None):
        listening.setsockopt(socket.IPPROTO_TCP, option, max(1, round(timeout_s * 1e3)))
