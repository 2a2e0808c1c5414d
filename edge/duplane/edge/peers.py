"""Who is at the other end of a connection, through proxies that are trusted by name. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

Network = IPv4Network | IPv6Network
_FORWARDING = ("x-forwarded-for", "x-real-ip", "forwarded")


@dataclass(frozen=True, slots=True)
class Peer:
    """A client. `is_local` only if it is certain that it runs on this machine."""

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
        # Whoever forwards for others speaks for somebody who may be anywhere.
        is_direct = not any(name in headers for name in _FORWARDING)
        return Peer(str(speaker), is_local=speaker.is_loopback and is_direct)
    forwarded = headers.get("x-forwarded-for") or headers.get("x-real-ip", "")
    for hop in reversed(forwarded.split(",")):
        before = _parse(hop.strip())
        if before is None:
            break
        speaker = before
        if not _is_in(speaker, trusted):
            break
    return Peer(str(speaker), is_local=False)


def _parse(text: str) -> IPv4Address | IPv6Address | None:
    """Read an address; one of IPv4 that came through IPv6 is the same as without."""
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _is_in(address: IPv4Address | IPv6Address, networks: Sequence[Network]) -> bool:
    return any(address in network for network in networks)
