"""Decides whether a process may be reached from other machines, or may call them.

Without settings that allow it by name, nothing listens beyond loopback without encryption and
credentials. What counts are the IP addresses that a name stands for, not its text.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncGenerator, Sequence

from duplane.fabric.addresses import is_loopback, parse_address
from duplane.fabric.process import StartError
from duplane.fabric.tls.settings import FabricTlsSettings

_log = logging.getLogger(__name__)
_WARN_INTERVAL_S = 3600.0
_RESOLVE_TIMEOUT_S = 5.0


async def addresses_beyond_loopback(listen: str) -> Sequence[str]:
    """Return the IP addresses that a server at host:port binds and other machines may reach.

    A name that cannot be resolved counts as an address of other machines.
    """
    address = parse_address(listen, min_port=0)
    return await _beyond_loopback(address.host, address.port, socket.AI_PASSIVE)


async def peers_beyond_loopback(peers: Sequence[str]) -> Sequence[str]:
    """Return the peers, given as host:port, that may be on another machine."""
    found: list[str] = []
    for peer in peers:
        address = parse_address(peer)
        if await _beyond_loopback(address.host, address.port, 0):
            found.append(peer)
    return found


async def _beyond_loopback(host: str, port: int, flags: int) -> Sequence[str]:
    try:
        async with asyncio.timeout(_RESOLVE_TIMEOUT_S):
            records = await asyncio.get_running_loop().getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=flags
            )
    except (OSError, TimeoutError):
        return () if is_loopback(host) else (host,)
    ips = dict.fromkeys(str(name[0]) for *_, name in records)
    return tuple(ip for ip in ips if not is_loopback(ip))


async def check_fabric_exposure(
    listen: str | None, peers: Sequence[str], tls: FabricTlsSettings
) -> str:
    """Check the gRPC addresses of a process: where it listens, and the peers that it calls.

    Returns a warning about connections that are neither encrypted nor authenticated; empty if there
    are none. Raises StartError for such connections if nobody has allowed them.
    """
    if tls.fabric_tls:
        return ""
    parts: list[str] = []
    if listen is not None and await addresses_beyond_loopback(listen):
        parts.append(f"other machines can connect to {listen}")
    if remote := await peers_beyond_loopback(peers):
        parts.append(f"this process calls {', '.join(remote)}")
    if not parts:
        return ""
    problem = f"{' and '.join(parts)} without TLS: anyone in between can read and control sessions"
    if not tls.fabric_plaintext:
        raise StartError(
            f"{problem}; give certificates with --fabric-tls DIR, or allow this on a private"
            " network with --fabric-plaintext"
        )
    return problem


async def check_metrics_exposure(listen: str, *, is_public_allowed: bool) -> None:
    """Check the address of metrics or of a receiver of spans; none if `listen` is empty.

    Raises StartError if other machines can reach it and nobody has allowed this.
    """
    if listen and not is_public_allowed and await addresses_beyond_loopback(listen):
        raise StartError(
            f"other machines can connect to {listen}, which has no TLS and no authentication;"
            " allow this on a private network with --metrics-public"
        )


@contextlib.asynccontextmanager
async def warned_hourly(warning: str) -> AsyncGenerator[None]:
    """Log a warning now and each hour during the body of the `with`; none if it is empty."""
    if not warning:
        yield
        return
    warning_each_hour = asyncio.create_task(_warn_hourly(warning))
    try:
        yield
    finally:
        warning_each_hour.cancel()
        await asyncio.wait({warning_each_hour})


async def _warn_hourly(warning: str) -> None:
    while True:
        _log.warning("%s", warning)
        await asyncio.sleep(_WARN_INTERVAL_S)
