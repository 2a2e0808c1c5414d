"""Makes ephemeral tokens, and accepts each of them for one session."""

from __future__ import annotations

from aiohttp import hdrs, web

from duplane.edge.access import Caller, CallerKind
from duplane.edge.clock import Clock
from duplane.edge.credentials.ephemeral import Grant, TokenSigner, UsedTokens, new_token_id
from duplane.edge.credentials.key_files import KeyFiles
from duplane.edge.credentials.keys import narrower
from duplane.edge.credentials.refusal import RefusedLoginError
from duplane.edge.routing import HTTP_CHAT_PATHS, find_route, parse_target
from duplane.edge.transport.client_address import join_headers
from duplane.edge.transport.origins import parse_origin

_RETRY_S = "10"


class EphemeralLogin:
    """Makes and accepts the ephemeral tokens of one edge."""

    def __init__(self, signer: TokenSigner, keys: KeyFiles, clock: Clock) -> None:
        self._signer = signer
        self._keys = keys
        self._clock = clock
        self._used = UsedTokens()

    def grant(
        self,
        caller: Caller,
        *,
        seconds: int,
        mode: str = "",
        origin: str = "",
        subject: str = "",
        may_record: bool | None = None,
    ) -> tuple[str, int]:
        """Return a new token of a caller, and the Unix time until which it opens a session."""
        expires_s = int(self._clock.now().wall_s) + seconds
        grant = Grant(
            token_id=new_token_id(),
            expires_s=expires_s,
            tenant=caller.tenant,
            credential=caller.credential,
            subject=subject,
            mode=mode,
            origin=origin,
            limits=caller.limits,
            may_record=may_record,
        )
        return self._signer.sign(grant), expires_s

    def login(self, token: str, request: web.Request) -> Caller:
        """Return the caller with a token, which opens no further session.

        Raises RefusedLoginError; HTTPForbidden if the token does not allow this request, and
        HTTPServiceUnavailable if too many tokens are in use.
        """
        grant = self._signer.verify(token)
        now_s = self._clock.now().wall_s
        if grant is None:
            raise RefusedLoginError("the ephemeral token is not valid")
        if now_s >= grant.expires_s:
            raise RefusedLoginError("the ephemeral token has expired")
        if problem := self._keys.problem(grant.credential):
            raise RefusedLoginError(problem)
        _check_request(grant, request)
        if _opens_session(request):
            if not self._used.has_room(grant.tenant, now_s):
                raise web.HTTPServiceUnavailable(
                    text="too many ephemeral tokens are in use",
                    headers={hdrs.RETRY_AFTER: _RETRY_S},
                )
            if not self._used.use(grant):
                raise RefusedLoginError("the ephemeral token was used before")
        return Caller(
            CallerKind.TENANT,
            tenant=grant.tenant,
            subject=grant.subject,
            credential=grant.credential,
            limits=narrower(self._keys.limits_of(grant.tenant), grant.limits),
            may_record=grant.may_record,
        )


def _check_request(grant: Grant, request: web.Request) -> None:
    path = request.raw_path
    if find_route(path) is None and not _is_chat(request):
        raise web.HTTPForbidden(text="an ephemeral token only opens sessions")
    mode = parse_target(path, join_headers(request.headers.items())).mode
    if grant.mode not in ("", mode):
        raise web.HTTPForbidden(text=f"the ephemeral token is for sessions of mode {grant.mode}")
    origin = parse_origin(request.headers.get(hdrs.ORIGIN, ""))
    if grant.origin and origin != parse_origin(grant.origin):
        raise web.HTTPForbidden(text="the ephemeral token is for pages of another origin")


def _opens_session(request: web.Request) -> bool:
    """Return whether a request begins a session, rather than getting a status without one."""
    is_upgrade = request.headers.get(hdrs.UPGRADE, "").strip().lower() == "websocket"
    return _is_chat(request) or (request.method == hdrs.METH_GET and is_upgrade)


def _is_chat(request: web.Request) -> bool:
    return request.method == hdrs.METH_POST and request.path in HTTP_CHAT_PATHS
