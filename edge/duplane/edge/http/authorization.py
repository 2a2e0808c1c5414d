"""Decides whether a request comes from an operator."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence

from aiohttp import web

from duplane.edge.transport.client_address import identify, join_headers, parse_networks

RequireOperator = Callable[[web.Request], None]  # raises HTTPForbidden
_FORBIDDEN = (
    "only operators may do this: send the edge's admin token as `Authorization: Bearer`; if the"
    " edge has no token, use http://localhost on the edge's own machine, without a proxy"
)


def operator_check(token: str, trusted_proxies: Sequence[str]) -> RequireOperator:
    """Return a function that raises HTTPForbidden unless a request comes from an operator.

    If the edge has a token, an operator's request contains the token. Otherwise, an operator's
    request comes from this machine, names this machine as its host, and has no header of a proxy or
    of a foreign web page. The function cannot detect a proxy on this machine that adds no header:
    set a token then.
    """
    proxies = parse_networks(trusted_proxies)

    def require_operator(request: web.Request) -> None:
        if token:
            sent = request.headers.get("Authorization", "").encode(errors="replace")
            is_operator = hmac.compare_digest(sent, f"Bearer {token}".encode())
        else:
            headers = join_headers(request.headers.items())
            is_operator = identify(request.remote or "", headers, proxies).is_local
        if not is_operator:
            raise web.HTTPForbidden(text=_FORBIDDEN)

    return require_operator
