"""Rules for requests of browsers: which pages may use the edge, and under which host names. Pure.

A browser sends the origin of a page with each WebSocket and with each request that changes
something, and a page cannot forge it. Other programs send no origin and are not restricted. The
rule of host names keeps out pages whose own name was made to resolve to the address of the edge
(DNS rebinding): the browser takes the edge for their own server.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from duplane.fabric.addresses import parse_ip

ANY = "*"
"""Stands for all origins, or for all host names."""

_DEFAULT_PORTS = {"http": "80", "https": "443"}
_AUTHORITY = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^\s:\[\]/@,*]+)(?::(?P<port>\d{1,5}))?")
_ORIGIN = re.compile(r"(?P<scheme>https?)://(?P<authority>[^/]+)")
_MAX_QUOTED = 200


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a page: scheme, host and port."""

    scheme: str
    host: str
    port: str


def parse_origin(text: str) -> Origin | None:
    """Parse the origin of a page. None for other text, as `null`, which hides the origin."""
    match = _ORIGIN.fullmatch(text.strip().lower())
    authority = match and _AUTHORITY.fullmatch(match["authority"])
    if not match or not authority:
        return None
    scheme = match["scheme"]
    return Origin(scheme, authority["host"], authority["port"] or _DEFAULT_PORTS[scheme])


def parse_origins(names: Sequence[str]) -> frozenset[Origin]:
    """Parse the origins of a setting, without ANY. Raises ValueError."""
    found: set[Origin] = set()
    for name in names:
        origin = parse_origin(name)
        if origin is None and name != ANY:
            raise ValueError(f"{name!r} is not https://HOST[:PORT], http://HOST[:PORT] or {ANY}")
        if origin:
            found.add(origin)
    return frozenset(found)


def check_hosts(names: Sequence[str]) -> None:
    """Raise ValueError if a name of a setting is not a host name, `*.DOMAIN` or ANY."""
    for name in names:
        rest = name.removeprefix("*.")
        match = _AUTHORITY.fullmatch(rest)
        if name != ANY and (match is None or match["port"]):
            raise ValueError(f"{name!r} is not a host name without port, *.DOMAIN or {ANY}")


@dataclass(frozen=True, slots=True)
class Target:
    """The server that a request names: the text of its host header, and the scheme if known."""

    authority: str
    scheme: str = ""

    @property
    def host(self) -> str:
        """The host in lower case. Empty if the header is malformed."""
        match = _AUTHORITY.fullmatch(self.authority.strip())
        return match["host"].lower() if match else ""

    def is_origin(self, origin: Origin) -> bool:
        """Return whether a page of this origin was loaded from this server."""
        match = _AUTHORITY.fullmatch(self.authority.strip().lower())
        if match is None or self.scheme not in ("", origin.scheme):
            return False
        port = match["port"] or _DEFAULT_PORTS[origin.scheme]
        return (match["host"], port) == (origin.host, origin.port)


def parse_target(headers: Mapping[str, str], *, is_tls: bool, is_proxied: bool) -> Target:
    """Return the server that a request names.

    The names of `headers` are in lower case. The headers of a trusted proxy (`is_proxied`) say what
    the client has named. Without TLS and such a header the scheme is not known, because an unknown
    proxy may speak TLS with the client.
    """
    authority = headers.get("host", "")
    scheme = "https" if is_tls else ""
    if is_proxied:
        # The last value is that of the nearest proxy.
        authority = headers.get("x-forwarded-host", authority).rpartition(",")[2]
        scheme = headers.get("x-forwarded-proto", "").rpartition(",")[2].strip().lower()
    return Target(authority.strip(), scheme if scheme in _DEFAULT_PORTS else "")


class BrowserRules:
    """Decides whether a request may come from the page that sends it.

    `certificate_names` returns the names in the certificate of the edge.
    """

    def __init__(
        self,
        allowed_origins: Sequence[str],
        allowed_hosts: Sequence[str],
        certificate_names: Callable[[], Sequence[str]],
    ) -> None:
        self._has_any_origin = ANY in allowed_origins
        self._origins = parse_origins(allowed_origins)
        self._has_any_host = ANY in allowed_hosts
        self._hosts = tuple(name.lower() for name in allowed_hosts)
        self._certificate_names = certificate_names

    def refusal(self, headers: Mapping[str, str], target: Target, *, is_page: bool = False) -> str:
        """Return why a request is refused, with the flag that allows it; empty if it is not.

        The names of `headers` are in lower case. A link on another site may open a page (`is_page`)
        of the edge: the browser shows it, and the other site cannot read it.
        """
        # Only programs that are not browsers send no host.
        if "host" in headers and not self._allows_host(target.host):
            name = _quoted(target.authority)
            return f"the server does not answer to the host {name}: --allowed-hosts allows a host"
        text = headers.get("origin")
        if text is not None:
            origin = parse_origin(text)
            if self.is_listed(text) or (origin and self._is_own(origin, headers, target)):
                return ""
            return f"pages of {_quoted(text)} may not use this server: --allowed-origins allows one"
        is_link = is_page and headers.get("sec-fetch-dest") == "document"
        if _is_cross_site(headers) and not (self._has_any_origin or is_link):
            return "pages of other sites may not use this server: --allowed-origins allows one"
        return ""

    def is_listed(self, origin: str) -> bool:
        """Return whether a setting allows the origin, so that answers may allow it, too."""
        return self._has_any_origin or parse_origin(origin) in self._origins

    def _is_own(self, origin: Origin, headers: Mapping[str, str], target: Target) -> bool:
        return target.is_origin(origin) and not _is_cross_site(headers)

    def _allows_host(self, host: str) -> bool:
        if self._has_any_host or host == "localhost" or parse_ip(host):
            return True
        return _is_named(host, self._hosts) or _is_named(host, self._certificate_names())


def _is_cross_site(headers: Mapping[str, str]) -> bool:
    return headers.get("sec-fetch-site", "").strip().lower() == "cross-site"


def _is_named(host: str, names: Sequence[str]) -> bool:
    """Return whether the names contain a host, also by a wildcard for its first label."""
    return bool(host) and (host in names or f"*.{host.partition('.')[2]}" in names)


def _quoted(text: str) -> str:
    return repr(text[:_MAX_QUOTED])
