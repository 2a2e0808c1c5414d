"""Network addresses as settings and messages have them: `host:port`, IPv6 hosts in brackets."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address

_ADDRESS = re.compile(r"(?P<host>\[[^\s\[\]]+\]|[^\s:\[\]/]+):(?P<port>[0-9]{1,5})", re.ASCII)
_MAX_PORT = 65_535
_RESOLVE_TIMEOUT_S = 5.0
# Where nobody answers. Nothing is sent there: the system only says from which address it would.
_FAR = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))


@dataclass(frozen=True, slots=True)
class Address:
    """A host (name or IP address, without brackets) and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """True if only processes on this machine can reach the address."""
        return is_loopback(self.host)

    @property
    def is_any(self) -> bool:
        """True if the host means all interfaces, as `0.0.0.0` does.

        A server can listen at such an address, but no client can connect to it.
        """
        ip = parse_ip(self.host)
        return ip is not None and ip.is_unspecified


def parse_address(text: str, name: str = "address", *, min_port: int = 1) -> Address:
    """Parse `host:port`. Pass `min_port=0` where port 0 means any free port.

    Raises ValueError with a message that begins with `name`.
    """
    match = _ADDRESS.fullmatch(text)
    port = int(match["port"]) if match else -1
    if match is None or not min_port <= port <= _MAX_PORT:
        raise ValueError(f"{name} is {text!r}, must be host:port")
    return Address(match["host"].strip("[]"), port)


async def resolve(addresses: Sequence[str]) -> Sequence[str]:
    """Return the addresses, with each host name replaced by all its IP addresses.

    A name that cannot be resolved is kept. Raises ValueError for a text that is not host:port.
    """
    found: dict[str, None] = {}  # keys are the addresses, in order
    for address in map(parse_address, addresses):
        found.update(dict.fromkeys(await _records(address)))
    return list(found)


async def _records(address: Address) -> Sequence[str]:
    if parse_ip(address.host):
        return [str(address)]
    try:
        async with asyncio.timeout(_RESOLVE_TIMEOUT_S):
            records = await asyncio.get_running_loop().getaddrinfo(
                address.host, address.port, type=socket.SOCK_STREAM
            )
    except (OSError, TimeoutError):
        return [str(address)]
    return [str(Address(str(name[0]), address.port)) for *_, name in records]


def is_loopback(host: str) -> bool:
    """True if `host` can only mean this machine, whatever a name server answers."""
    ip = parse_ip(host)
    return host.lower() == "localhost" or (ip is not None and ip.is_loopback)


def is_this_machine(ip: IPv4Address | IPv6Address) -> bool:
    """True if an interface of this machine has the address."""
    if ip.is_loopback:
        return True
    family = socket.AF_INET6 if ip.version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((str(ip), 0))
        except OSError:
            return False
    return True


def outgoing_addresses() -> Iterator[IPv4Address | IPv6Address]:
    """Yield the addresses from which this machine reaches others."""
    for family, far in _FAR:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((far, 9))
            if address := parse_ip(str(probe.getsockname()[0])):
                yield address


def parse_ip(text: str) -> IPv4Address | IPv6Address | None:
    """Parse an IP address, with or without brackets and zone. Return None for other text.

    An IPv4 address mapped into IPv6 is returned as IPv4.
    """
    try:
        ip = ip_address(text.strip("[]").partition("%")[0])
    except ValueError:
        return None
    return (ip.ipv4_mapped or ip) if isinstance(ip, IPv6Address) else ip
