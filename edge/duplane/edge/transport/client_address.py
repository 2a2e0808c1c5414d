"""The client address behind trusted proxies, and whether a client runs on this machine. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_network
from typing import Literal

from duplane.fabric.addresses import is_loopback, parse_ip

Network = IPv4Network | IPv6Network
AddressForm = Literal["full", "short"]
# Headers that proxies add: full names, and beginnings of names.
_FORWARDING = frozenset(
    {
        *("via", "forwarded", "client-ip", "true-client-ip", "fastly-client-ip", "fly-client-ip"),
        *("x-real-ip", "x-client-ip", "x-cluster-client-ip", "x-originating-ip", "x-proxyuser-ip"),
        *("x-remote-ip", "x-remote-addr", "x-host", "x-appengine-user-ip", "x-amzn-trace-id"),
    }
)
_AUTHORITY = re.compile(r"(?P<host>\[[^\]]+\]|[^:]+)(?::\d+)?")
_FORWARDING_PREFIXES = ("x-forwarded", "x-original-", "x-envoy-", "x-azure-", "cf-")


@dataclass(frozen=True, slots=True)
class ClientAddress:
    """The address of a client.

    `is_direct` means that the client runs on this machine and is no proxy. `is_local` means that,
    besides, its request names this machine and comes from no foreign web page. If a proxy on this
    machine adds no headers, its remote clients look direct and local, too.
    """

    address: str
    is_local: bool
    is_direct: bool = False

    @property
    def network(self) -> str:
        """The key by which limits count a client: its address, or for IPv6 its /64 network."""
        address = parse_ip(self.address)
        if isinstance(address, IPv6Address):
            return str(IPv6Network((address, 64), strict=False))
        return self.address

    def logged(self, form: AddressForm) -> str:
        """Return the address as log lines show it."""
        ip = parse_ip(self.address)
        if form == "full" or ip is None:
            return self.address
        prefix_length = 24 if ip.version == 4 else 48
        return str(ip_network((ip, prefix_length), strict=False))


def join_headers(fields: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return headers by lower-case name; repeated headers are joined by commas."""
    joined: dict[str, str] = {}
    for name, value in fields:
        key = name.lower()
        joined[key] = f"{joined[key]}, {value}" if key in joined else value
    return joined


def parse_networks(names: Sequence[str]) -> tuple[Network, ...]:
    """Parse addresses and networks (`10.0.0.7`, `10.0.0.0/8`, `::1`). Raises ValueError."""
    return tuple(ip_network(name.strip()) for name in names if name.strip())


def is_proxy(connected: str, trusted: Sequence[Network]) -> bool:
    """Return whether a connection comes from a trusted proxy."""
    address = parse_ip(connected)
    return address is not None and _is_in(address, trusted)


def identify(
    connected: str, headers: Mapping[str, str], trusted: Sequence[Network]
) -> ClientAddress:
    """Return the client behind a connection from the address `connected`.

    If `connected` is a trusted proxy, the client is the last address in `X-Forwarded-For` that is
    not a trusted proxy, or else `X-Real-IP`. If `connected` is not a trusted proxy, it is the
    client, and these headers are ignored. The names of `headers` are in lower case.
    """
    client = parse_ip(connected)
    if client is None:
        return ClientAddress(connected, is_local=False)
    if not _is_in(client, trusted):
        is_direct = client.is_loopback and not _is_forwarded(headers)
        is_local = is_direct and _names_this_machine(headers)
        return ClientAddress(str(client), is_local, is_direct)
    forwarded = headers.get("x-forwarded-for") or headers.get("x-real-ip", "")
    for hop in reversed(forwarded.split(",")):
        before = _parse_hop(hop.strip())
        if before is None:
            break
        client = before
        if not _is_in(client, trusted):
            break
    return ClientAddress(str(client), is_local=False)


def _parse_hop(text: str) -> IPv4Address | IPv6Address | None:
    """Return the address of one hop, to which some proxies add the port. None for other text."""
    match = _AUTHORITY.fullmatch(text)
    return parse_ip(text) or (parse_ip(match["host"]) if match else None)


def _is_forwarded(headers: Mapping[str, str]) -> bool:
    """Return whether the headers show a proxy: it adds headers for its remote clients."""
    return any(name in _FORWARDING or name.startswith(_FORWARDING_PREFIXES) for name in headers)


def _names_this_machine(headers: Mapping[str, str]) -> bool:
    """Return whether the headers name this machine, and no foreign web page.

    A foreign web page can make a browser on this machine send a request; the `Host` or `Origin` of
    this request then names the page's own host.
    """
    origin = headers.get("origin")
    is_foreign = origin is not None and not _is_this_machine(origin.partition("://")[2])
    return _is_this_machine(headers.get("host", "")) and not is_foreign


def _is_this_machine(authority: str) -> bool:
    """Return whether `host[:port]` means this machine for certain, without a name server."""
    match = _AUTHORITY.fullmatch(authority.strip())
    return match is not None and is_loopback(match["host"])


def _is_in(address: IPv4Address | IPv6Address, networks: Sequence[Network]) -> bool:
    return any(address in network for network in networks)
