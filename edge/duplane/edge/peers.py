"""Who is at the other end of a connection, through proxies that are trusted by name. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

Network = IPv4Network | IPv6Network
# What proxies add to what they pass on: these, and whatever begins so.
_FORWARDING = frozenset(
    {
        *("via", "forwarded", "client-ip", "true-client-ip", "fastly-client-ip", "fly-client-ip"),
        *("x-real-ip", "x-client-ip", "x-cluster-client-ip", "x-originating-ip", "x-proxyuser-ip"),
        *("x-remote-ip", "x-remote-addr", "x-host", "x-appengine-user-ip", "x-amzn-trace-id"),
    }
)
_AUTHORITY = re.compile(r"(?:\[(?P<bracketed>[^\]]+)\]|(?P<host>[^:]+))(?::\d+)?")
_FORWARDING_PREFIXES = ("x-forwarded", "x-original-", "x-envoy-", "x-azure-", "cf-")


@dataclass(frozen=True, slots=True)
class Peer:
    """A client. `is_local` if it runs on this machine, and speaks for nobody else by any sign.

    A proxy on this machine that leaves no sign looks the same.
    """

    address: str
    is_local: bool

    @property
    def site(self) -> str:
        """What counts as one client: an address, or the /64 that a client of IPv6 has to itself."""
        address = _parse(self.address)
        if isinstance(address, IPv6Address):
            return str(IPv6Network((address, 64), strict=False))
        return self.address


def join_headers(fields: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return headers by lower-case name; what is said several times is one list."""
    joined: dict[str, str] = {}
    for name, value in fields:
        key = name.lower()
        joined[key] = f"{joined[key]}, {value}" if key in joined else value
    return joined


def parse_networks(names: Sequence[str]) -> tuple[Network, ...]:
    """Read addresses and networks (`10.0.0.7`, `10.0.0.0/8`, `::1`). Raises ValueError."""
    return tuple(ip_network(name.strip()) for name in names if name.strip())


def is_proxy(connected: str, trusted: Sequence[Network]) -> bool:
    """Tell whether a connection comes from a proxy that is trusted."""
    address = _parse(connected)
    return address is not None and _is_in(address, trusted)


def identify(connected: str, headers: Mapping[str, str], trusted: Sequence[Network]) -> Peer:
    """Tell who speaks over a connection from `connected`; headers by lower-case name.

    `X-Forwarded-For` is read from its end, past every proxy that is trusted, to the first address
    that is not; `X-Real-IP` counts without it. What anyone else says there is not believed.
    """
    speaker = _parse(connected)
    if speaker is None:
        return Peer(connected, is_local=False)
    if not _is_in(speaker, trusted):
        return Peer(str(speaker), is_local=speaker.is_loopback and _speaks_for_itself(headers))
    forwarded = headers.get("x-forwarded-for") or headers.get("x-real-ip", "")
    for hop in reversed(forwarded.split(",")):
        before = _parse(hop.strip())
        if before is None:
            break
        speaker = before
        if not _is_in(speaker, trusted):
            break
    return Peer(str(speaker), is_local=False)


def _speaks_for_itself(headers: Mapping[str, str]) -> bool:
    """Tell whether a request shows no sign of coming from elsewhere.

    Whoever forwards for others speaks for somebody who may be anywhere. A web page may, too: it
    can make a browser on this machine ask, under the page's own name for us, or with its `Origin`.
    """
    if any(name in _FORWARDING or name.startswith(_FORWARDING_PREFIXES) for name in headers):
        return False
    origin = headers.get("origin")
    is_foreign = origin is not None and not _is_this_machine(origin.partition("://")[2])
    return _is_this_machine(headers.get("host", "")) and not is_foreign


def _is_this_machine(authority: str) -> bool:
    """Tell whether `host[:port]` can mean nobody but this machine, whatever a name server says."""
    match = _AUTHORITY.fullmatch(authority.strip())
    host = (match["bracketed"] or match["host"]) if match else ""
    address = _parse(host)
    return host.lower() == "localhost" or (address is not None and address.is_loopback)


def _parse(text: str) -> IPv4Address | IPv6Address | None:
    """Read an address; one of IPv4 that came through IPv6 is the same as without."""
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _is_in(address: IPv4Address | IPv6Address, networks: Sequence[Network]) -> bool:
    return any(address in network for network in networks)
