"""The admin token: which requests come from an operator."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence

from aiohttp import web

from duplane.edge.transport.client_address import identify, join_headers, parse_networks

RequireOperator = Callable[[web.Request], None]  # raises HTTPForbidden
_FORBIDDEN = (
    "only operators may do this: send the edge's admin token as `Authorization: Bearer`, or, where"
    " none is set, ask http://localhost from the edge's own machine, and through no proxy"
)


def operator_check(token: str, trusted_proxies: Sequence[str]) -> RequireOperator:
    """Return a function that raises HTTPForbidden unless a request comes from an operator.

    With a token, an operator sends it. Without one, an operator sends the request from this
    machine, to a name that means this machine only, and no header shows a proxy or a foreign web
    page. A proxy on this machine that adds no header cannot be told apart: it needs a token.
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
