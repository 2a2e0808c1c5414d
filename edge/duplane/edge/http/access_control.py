"""Decides before any handler whether a request may reach its route, and for whom it acts."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from http import HTTPStatus

from aiohttp import web
from aiohttp.web_urldispatcher import AbstractRoute

from duplane.edge.access import (
    Authenticator,
    Caller,
    CallerKind,
    Handler,
    Level,
    client_address,
    set_caller,
    set_client_address,
    set_level,
)
from duplane.edge.http.audit import log_action
from duplane.edge.http.http_route import HttpRoute
from duplane.edge.http.messages import closing
from duplane.edge.transport.client_address import (
    AddressForm,
    Network,
    identify,
    is_proxy,
    join_headers,
)
from duplane.edge.transport.client_protocol import ClientProtocol
from duplane.edge.transport.origins import BrowserRules, parse_target
from duplane.edge.transport.rate_limit import NetworkRates
from duplane.fabric.repeated_log import RepeatedLog

_log = logging.getLogger(__name__)

_OPERATORS_ONLY = (
    "only operators may do this: send an operator's key or the edge's admin token as"
    " `Authorization: Bearer`; if the edge has neither, and demands no credential of clients, use"
    " http://localhost on the edge's own machine, without a proxy"
)
_OPERATORS = (Level.MONITOR, Level.OPERATOR)
_WITH_BODY = ("POST", "PUT", "PATCH")
_JSON, _FORM = "application/json", "multipart/form-data"
_CORS_ORIGIN = web.RequestKey("listed origin", str)
# The clients of OpenAI's API send these in pages, too. The edge ignores them.
_IGNORED_HEADERS = (
    *("OpenAI-Beta", "OpenAI-Organization", "OpenAI-Project"),
    *(
        f"X-Stainless-{name}"
        for name in (
            *("Arch", "Helper-Method", "Lang", "OS", "Package-Version", "Retry-Count"),
            *("Runtime", "Runtime-Version", "Timeout"),
        )
    ),
)
_PREFLIGHT = {
    "Access-Control-Allow-Methods": "GET, HEAD, POST, PUT, DELETE",
    "Access-Control-Allow-Headers": ", ".join(
        ("Authorization", "Content-Type", "X-Client-ID", "traceparent", *_IGNORED_HEADERS)
    ),
    "Access-Control-Max-Age": "600",
}
_HSTS = "max-age=31536000"


@dataclass(frozen=True, slots=True)
class AccessControl:
    """What one listener demands of all requests. Several listeners may share the parts.

    `requests` limits the requests of one network without a credential. If `has_operators` is false,
    operators use another listener: here nobody acts as one.
    """

    authenticator: Authenticator
    browsers: BrowserRules
    proxies: Sequence[Network]
    requests: NetworkRates
    logged_addresses: AddressForm = "full"
    has_operators: bool = True
    pins_tls: bool = True
    """Whether browsers are told to use this host name only over TLS from now on."""
    # One for all origins and hosts: strangers must not fill the log.
    refusals: RepeatedLog = field(default_factory=lambda: RepeatedLog(_log))

    async def handle(
        self,
        request: web.Request,
        handler: Handler,
        routes: Mapping[AbstractRoute, HttpRoute],
    ) -> web.StreamResponse:
        """Pass a request to its handler. Raises HTTPException if it is refused."""
        headers = join_headers(request.headers.items())
        set_client_address(request, identify(request.remote or "", headers, self.proxies))
        route = routes.get(request.match_info.route)
        self._check_browser(request, headers, is_page=route is not None and route.is_page)
        if request.method == "OPTIONS" and "access-control-request-method" in headers:
            return self._preflight(request)
        if route is None:
            return await self._refuse(request, handler, routes)
        if not self.has_operators and _is_of_operators(route):
            self._count(request)
            raise web.HTTPNotFound
        caller = await self._identify(request, route)
        if caller is None:
            return await handler(request)
        set_caller(request, caller)
        if not caller.permits(route.level, route.scope):
            if caller.kind is not CallerKind.ANONYMOUS:
                self._count(request)
                self._log(request, route, caller, HTTPStatus.FORBIDDEN.value)
            raise web.HTTPForbidden(text=_refusal(route, caller))
        _check_body(request, route)
        if route.takes_form and not _has_credential(request):
            raise web.HTTPUnauthorized(text="a form needs a credential in `Authorization`")
        if route.level is not Level.OPERATOR:
            return await handler(request)
        status = HTTPStatus.INTERNAL_SERVER_ERROR.value
        try:
            response = await handler(request)
            status = response.status
        except web.HTTPException as refusal:
            status = refusal.status
            raise
        finally:
            self._log(request, route, caller, status)
        return response

    async def _refuse(
        self,
        request: web.Request,
        handler: Handler,
        routes: Mapping[AbstractRoute, HttpRoute],
    ) -> web.StreamResponse:
        """Raise the refusal of a request without a route: 404, or 405 for another method."""
        self._count(request)
        if not (self.has_operators or await _is_of_clients(request, routes)):
            raise web.HTTPNotFound  # as for the right method: 405 would tell of the path
        return await handler(request)

    def _log(self, request: web.Request, route: HttpRoute, caller: Caller, status: int) -> None:
        log_action(request, route, caller, status, self.logged_addresses)

    async def add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """Add the headers that every answer has, also a refusal."""
        headers = response.headers
        headers.popall("Server", None)  # names the server software
        headers.setdefault("Cache-Control", "no-store")
        headers["X-Content-Type-Options"] = "nosniff"
        if request.secure and self.pins_tls:
            headers["Strict-Transport-Security"] = _HSTS
        if origin := request.get(_CORS_ORIGIN):
            headers["Access-Control-Allow-Origin"] = origin
            headers["Access-Control-Expose-Headers"] = "Retry-After"
            headers.add("Vary", "Origin")

    def _check_browser(
        self, request: web.Request, headers: Mapping[str, str], *, is_page: bool
    ) -> None:
        is_proxied = is_proxy(request.remote or "", self.proxies)
        target = parse_target(headers, is_tls=request.secure, is_proxied=is_proxied)
        if refusal := self.browsers.refusal(headers, target, is_page=is_page):
            self.refusals.report(f"a request was refused: {refusal}")
            raise web.HTTPForbidden(text=refusal)
        origin = headers.get("origin", "")
        if origin and self.browsers.is_listed(origin):
            request[_CORS_ORIGIN] = origin

    def _preflight(self, request: web.Request) -> web.StreamResponse:
        """Answer a browser that asks whether a page may send a request."""
        self._count(request)
        headers = _PREFLIGHT if _CORS_ORIGIN in request else None
        return closing(web.Response(status=HTTPStatus.NO_CONTENT, headers=headers))

    async def _identify(self, request: web.Request, route: HttpRoute) -> Caller | None:
        """Return the sender. None if it has no valid credential and needs none."""
        set_level(request, route.level)
        try:
            caller = await self.authenticator.authenticate(request)
        except web.HTTPException:
            self._count(request)
            if route.level is Level.PUBLIC:
                return None
            raise
        if caller.kind is CallerKind.ANONYMOUS:
            self._count(request)
        elif isinstance(request.protocol, ClientProtocol):
            request.protocol.exempt()
        if caller.kind is CallerKind.OPERATOR and not self.has_operators:
            return replace(caller, scopes=frozenset())
        return caller

    def _count(self, request: web.Request) -> None:
        """Count a request of a network without a credential. Raises HTTPTooManyRequests."""
        address = client_address(request)
        if address.is_direct:
            return
        wait_s = self.requests.spend(address.network, asyncio.get_running_loop().time())
        if wait_s:
            raise web.HTTPTooManyRequests(
                text="too many requests of this address", headers={"Retry-After": _whole(wait_s)}
            )


def _is_of_operators(route: HttpRoute) -> bool:
    return route.is_for_operators or route.level in _OPERATORS


async def _is_of_clients(request: web.Request, routes: Mapping[AbstractRoute, HttpRoute]) -> bool:
    """Return whether clients have a route at the path of a request, for any method."""
    for route, known in routes.items():
        if not _is_of_operators(known) and route.resource:
            _, methods = await route.resource.resolve(request)
            if methods:
                return True
    return False


def _check_body(request: web.Request, route: HttpRoute) -> None:
    """Refuse bodies that a foreign page could send without asking the browser first."""
    if request.method not in _WITH_BODY:
        return
    wanted = _FORM if route.takes_form else _JSON
    if request.content_type != wanted or "Content-Type" not in request.headers:
        raise web.HTTPUnsupportedMediaType(text=f"the Content-Type of the body must be {wanted}")


def _has_credential(request: web.Request) -> bool:
    """Return whether a request comes with a credential that no foreign page can add."""
    return "Authorization" in request.headers or client_address(request).is_local


def _refusal(route: HttpRoute, caller: Caller) -> str:
    if caller.scopes:
        return f"this operator lacks the scope {route.scope.value!r}"
    return _OPERATORS_ONLY


def _whole(seconds: float) -> str:
    """Return whole seconds, as the header `Retry-After` has them."""
    return str(max(1, math.ceil(seconds)))
