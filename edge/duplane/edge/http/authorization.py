"""Finds out whether a request comes from an operator, where clients need no credential."""

from __future__ import annotations

import hmac

from aiohttp import web

from duplane.edge.access import ALL_SCOPES, ANONYMOUS, Caller, CallerKind, client_address

_BY_TOKEN = Caller(CallerKind.OPERATOR, credential="admin token", scopes=ALL_SCOPES)
_LOCAL = Caller(CallerKind.OPERATOR, credential="this machine", scopes=ALL_SCOPES)


class OpenAuthenticator:
    """Accepts every client without a credential.

    If the edge has a token, an operator's request contains the token. Otherwise, an operator's
    request comes from this machine, names this machine as its host, and has no header of a proxy or
    of a foreign web page. The authenticator cannot detect a proxy on this machine that adds no
    header: set a token then.
    """

    def __init__(self, admin_token: str) -> None:
        self._token = admin_token

    async def authenticate(self, request: web.Request) -> Caller:
        """Return an operator or the anonymous sender."""
        if not self._token:
            return _LOCAL if client_address(request).is_local else ANONYMOUS
        sent = request.headers.get("Authorization", "").encode(errors="replace")
        is_operator = hmac.compare_digest(sent, f"Bearer {self._token}".encode())
        return _BY_TOKEN if is_operator else ANONYMOUS
