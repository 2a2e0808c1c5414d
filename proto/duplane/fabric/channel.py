"""gRPC channels and servers, with the options that all processes of a fabric use."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc.aio
from grpc_health.v1 import health as _typed_health
from grpc_health.v1 import health_pb2
from grpc_health.v1 import health_pb2_grpc as _typed_health_grpc
from grpc_reflection.v1alpha import reflection

from duplane.fabric.process import StartError
from duplane.fabric.tls.handshakes import Handshakes
from duplane.fabric.tls.identity import Role, server_name
from duplane.fabric.tls.interceptor import RoleInterceptor

if TYPE_CHECKING:
    # Not imported without TLS: it imports cryptography, which takes a tenth of a second.
    from duplane.fabric.tls.credentials import FabricCredentials

# The published stubs have no types for the asyncio API of this package.
health: Any = _typed_health
health_grpc: Any = _typed_health_grpc

# This limit is large enough for a unit with several pictures, or a long recording of a voice.
MAX_MESSAGE_BYTES = 32 * 1024 * 1024
# Number of bytes of a stream that may be under way or unread: about ten seconds of sound. If this
# number is not set, gRPC begins with 64 KB, which is less than one delta, and sends pings to
# measure the network. These pings cost several system calls and thread switches per unit.
_WINDOW_BYTES = 1024 * 1024
# gRPC pings a peer from which nothing has arrived for the keepalive time. If the peer does not
# answer the ping within the ping timeout, gRPC closes the connection.
_KEEPALIVE_MS = 2_000
_PING_TIMEOUT_S = 5.0
_OPTIONS: Sequence[tuple[str, Any]] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.lookahead_bytes", _WINDOW_BYTES),
    ("grpc.http2.bdp_probe", 0),
)
SERVER_OPTIONS: Sequence[tuple[str, Any]] = (
    *_OPTIONS,
    ("grpc.so_reuseport", 0),  # refuse a port that another process uses
    ("grpc.http2.min_ping_interval_without_data_ms", _KEEPALIVE_MS // 2),
)


def _ping_timeout(timeout_s: float) -> Sequence[tuple[str, Any]]:
    """Return the two options that limit the wait for the answer to a ping.

    Both options have the same time, because gRPC uses the longer one.
    """
    timeout_ms = int(timeout_s * 1000)
    return (
        ("grpc.keepalive_timeout_ms", timeout_ms),
        ("grpc.http2.ping_timeout_ms", timeout_ms),
    )


CLIENT_OPTIONS: Sequence[tuple[str, Any]] = (
    *_OPTIONS,
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    *_ping_timeout(_PING_TIMEOUT_S),
    ("grpc.enable_http_proxy", 0),  # ignore proxies that the environment names
    # Try often to connect to a peer that may have restarted: a scheduler that has lost its queue
    # waits only a short time for its callers. The last value limits the time of one attempt.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 300),
    ("grpc.min_reconnect_backoff_ms", 500),
    # A new channel connects at once, though another channel has just failed at the same address.
    ("grpc.use_local_subchannel_pool", 1),
)


def open_channel(
    address: str, role: Role = Role.SCHEDULER, credentials: FabricCredentials | None = None
) -> grpc.aio.Channel:
    """Return a channel to host:port. The channel connects at its first call.

    With `credentials` the channel uses mutual TLS, and the peer must have a certificate of `role`.
    """
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)
    options = (*CLIENT_OPTIONS, ("grpc.ssl_target_name_override", server_name(role)))
    return grpc.aio.secure_channel(address, credentials.channel_credentials, options=options)


@dataclass(frozen=True, slots=True)
class CallLimits:
    """How many calls a server runs at the same time.

    A call above `total` is refused with RESOURCE_EXHAUSTED. A call above `per_connection` waits in
    its client.
    """

    total: int = 4096
    per_connection: int = 4096


class FabricServer:
    """A gRPC server with the official health and reflection services.

    Register servicers on `grpc`, then call `start`. From then until `stop`, the health service
    reports all `services` as SERVING, unless `set_serving` changes that. The server closes the
    connection of a client that does not answer a ping within `ping_timeout_s`. `limits` bound the
    calls, with those of the health service. A call whose message is longer than `max_message_bytes`
    ends with RESOURCE_EXHAUSTED when the length arrives: gRPC reads the only message of a call
    before any check, so the limit also bounds the memory of calls that are refused later.

    With `credentials` the server uses mutual TLS, calls are refused that the role of the caller may
    not make, and there is no reflection.
    """

    def __init__(
        self,
        *services: str,
        ping_timeout_s: float = _PING_TIMEOUT_S,
        credentials: FabricCredentials | None = None,
        limits: CallLimits = CallLimits(),
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self._credentials = credentials
        self._handshakes = Handshakes()
        self._watching: asyncio.Task[None] | None = None
        self.grpc = grpc.aio.server(
            options=(
                *SERVER_OPTIONS,
                *_ping_timeout(ping_timeout_s),
                ("grpc.max_concurrent_streams", limits.per_connection),
                ("grpc.max_receive_message_length", max_message_bytes),
            ),
            interceptors=[RoleInterceptor(credentials, self._handshakes)] if credentials else [],
            maximum_concurrent_rpcs=limits.total,
        )
        self._services = ("", *services)
        self._health = health.aio.HealthServicer()
        health_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        if credentials is None:
            names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self.grpc)

    async def start(self, listen: str) -> str:
        """Serve on host:port, where port 0 means any free port. Return the bound host:port.

        Raises StartError if the address cannot be bound.
        """
        try:
            port = self._add_port(listen)
        except RuntimeError as error:
            raise StartError(f"cannot listen on {listen}: {error}") from None
        await self.grpc.start()
        if self._credentials:
            self._watching = asyncio.create_task(self._handshakes.run())
        await self.set_serving(True)
        return f"{listen.rpartition(':')[0]}:{port}"

    def _add_port(self, listen: str) -> int:
        if self._credentials:
            secure = self._credentials.server_credentials(self._handshakes.begin)
            return self.grpc.add_secure_port(listen, secure)
        return self.grpc.add_insecure_port(listen)

    async def set_serving(self, is_serving: bool) -> None:
        """Set the status that the health service reports. Calls are still served."""
        status = health_pb2.HealthCheckResponse
        for service in self._services:
            await self._health.set(service, status.SERVING if is_serving else status.NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, wait up to `grace_s` for running ones, then cancel them."""
        if self._watching:
            self._watching.cancel()
        await self._health.enter_graceful_shutdown()
        await self.grpc.stop(grace_s)
