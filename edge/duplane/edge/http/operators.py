"""Who may change things and listen to recordings."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence

from aiohttp import web

from duplane.edge.peers import identify, join_headers, parse_networks

RequireOperator = Callable[[web.Request], None]  # raises HTTPForbidden
_FORBIDDEN = (
    "only operators may do this: send the edge's admin token as `Authorization: Bearer`, or, where"
    " none is set, ask http://localhost from the edge's own machine, and through no proxy"
)


def operator_check(token: str, trusted_proxies: Sequence[str]) -> RequireOperator:
    """Return what raises for whoever is no operator.

    With a token, whoever sends it is one; without, whoever asks from this machine itself, by a
    name that nobody else can have, and with no sign of a proxy or of a web page from elsewhere.
    A proxy on this machine that leaves no sign is taken for an operator: it needs a token.
    """
    proxies = parse_networks(trusted_proxies)

    def require_operator(request: web.Request) -> None:
        if token:
            told = request.headers.get("Authorization", "").encode(errors="replace")
            is_operator = hmac.compare_digest(told, f"Bearer {token}".encode())
        else:
            headers = join_headers(request.headers.items())
            is_operator = identify(request.remote or "", headers, proxies).is_local
        if not is_operator:
            raise web.HTTPForbidden(text=_FORBIDDEN)

    return require_operator
