"""Finds out who sends a request: a tenant or an operator, by the credential in the request."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import math
from collections.abc import AsyncGenerator, Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

from aiohttp import hdrs, web

from duplane.edge.access import (
    ALL_SCOPES,
    ANONYMOUS,
    LOCAL_OPERATOR,
    Caller,
    CallerKind,
    Level,
    client_address,
    level_of,
)
from duplane.edge.clock import Clock
from duplane.edge.credentials.carriers import (
    EPHEMERAL_PREFIX,
    Carrier,
    Presented,
    bearer_token,
    presented_token,
)
from duplane.edge.credentials.ephemeral import TokenSigner
from duplane.edge.credentials.ephemeral_login import EphemeralLogin
from duplane.edge.credentials.key_files import KeyFiles
from duplane.edge.credentials.keys import KEY_PREFIX, narrower
from duplane.edge.credentials.refusal import IssuerUnreachableError, RefusedLoginError
from duplane.edge.credentials.settings import CredentialSettings
from duplane.edge.transport.rate_limit import failed_logins

if TYPE_CHECKING:  # the module needs the extra `jwt`
    from duplane.edge.credentials.jwt_tokens import JwtLogin

_CHECK_INTERVAL_S = 5.0
_ISSUER_RETRY_S = "30"
_CHALLENGE = {hdrs.WWW_AUTHENTICATE: "Bearer"}
_MISSING = (
    "this edge demands a credential: send an API key or a token as `Authorization: Bearer`; a"
    " browser offers the subprotocol duplane.bearer.TOKEN"
)
_INVALID = "the credential is not valid"
_BY_ADMIN_TOKEN = Caller(CallerKind.OPERATOR, credential="admin token", scopes=ALL_SCOPES)


class CredentialAuthenticator:
    """Authenticates clients by API keys, JWTs and ephemeral tokens, and operators by keys.

    If clients need no credential, the tokens that they send are ignored. If no operator has a
    credential either, then an operator's request comes from this machine, names this machine as its
    host, and has no header of a proxy or of a foreign web page. A proxy on this machine that adds
    no header cannot be detected: give operators credentials then.

    Raises ValueError for a file that cannot be used. `running` keeps the files up to date.
    """

    def __init__(
        self,
        settings: CredentialSettings,
        admin_token: str,
        clock: Clock,
        *,
        is_behind_proxy: bool = False,
    ) -> None:
        self._are_required = settings.are_required
        self._admin_token = admin_token.encode()
        self._clock = clock
        self._failed_logins = failed_logins()
        self._reading = asyncio.Lock()
        self.refused_count = 0  # logins
        self.keys = KeyFiles(settings, clock)
        signer = TokenSigner.load(settings.token_key_file)
        self.ephemeral = EphemeralLogin(signer, self.keys, clock)
        self._jwt = _jwt_login(settings, clock) if settings.jwks else None
        # Being on this machine makes an operator only where nothing else does. Behind a proxy,
        # requests of its clients can look like those of this machine.
        self._is_local_operator = not (
            self._admin_token or settings.operator_keys or settings.are_required or is_behind_proxy
        )

    @property
    def tenants(self) -> Collection[str]:
        """The tenants that the file of API keys names."""
        return self.keys.tenants

    async def reload(self) -> None:
        """Read the files of keys again."""
        await self._read(self.keys.reload)

    async def _read(self, read: Callable[[], None]) -> None:
        """Read files in a thread, one call after the other: a file with all keys takes 0.3 s."""
        async with self._reading:
            await asyncio.to_thread(read)

    @contextlib.asynccontextmanager
    async def running(
        self, check_sessions: Callable[[], None], interval_s: float = _CHECK_INTERVAL_S
    ) -> AsyncGenerator[None]:
        """Keep keys up to date during the body of the `with`.

        After each check of the files, `check_sessions` must end the sessions whose caller now has a
        `problem`.
        """
        async with self._jwt.keys.refreshed() if self._jwt else contextlib.nullcontext():
            watching = asyncio.create_task(self._watch(check_sessions, interval_s))
            try:
                yield
            finally:
                watching.cancel()
                await asyncio.wait({watching})

    async def _watch(self, check_sessions: Callable[[], None], interval_s: float) -> None:
        while True:
            await asyncio.sleep(interval_s)
            await self._read(self.keys.reload_if_changed)
            check_sessions()

    def problem(self, caller: Caller) -> str:
        """Return why a session of a caller must end; empty if it may continue.

        JWTs and ephemeral tokens are checked when a session begins: they are too short-lived for
        whole sessions. A session that began with an ephemeral token ends with the API key that
        asked for the token.
        """
        return self.keys.problem(caller.credential)

    async def authenticate(self, request: web.Request) -> Caller:
        """Return the sender of a request. Raises HTTPException: see `Authenticator`."""
        if not self._are_required:
            return self._open_caller(request)
        try:
            presented = presented_token(request.headers.items(), request.raw_path)
        except ValueError as error:
            raise web.HTTPBadRequest(text=str(error)) from None
        if presented is None:
            raise web.HTTPUnauthorized(text=_MISSING, headers=_CHALLENGE)
        if presented.carrier is Carrier.COOKIE and hdrs.ORIGIN not in request.headers:
            raise web.HTTPForbidden(text="a cookie needs a request with the header Origin")
        try:
            return await self._caller(presented, request)
        except RefusedLoginError as refusal:
            self._count_failure(request)
            raise web.HTTPUnauthorized(text=str(refusal), headers=_CHALLENGE) from None

    async def _caller(self, presented: Presented, request: web.Request) -> Caller:
        token = presented.token
        if token.startswith(EPHEMERAL_PREFIX):
            return self.ephemeral.login(token, request)
        is_header = presented.carrier is Carrier.HEADER
        # Only an admin token could be guessed: keys are random, and all other tokens are signed. So
        # clients that share their address with a failing one can still use theirs.
        if is_header and not self._wait_s(request) and self._is_admin_token(token):
            return _BY_ADMIN_TOKEN
        if token.startswith(KEY_PREFIX):
            return _accepted(self.keys.find_tenant(token)) or self._operator(token, is_header)
        if self._jwt:
            caller = await self._jwt_caller(self._jwt, token)
            if caller.kind is CallerKind.TENANT or is_header:
                return caller
        raise RefusedLoginError(_INVALID)

    def _operator(self, token: str, is_header: bool) -> Caller:
        """Return the operator with a key, which only the header `Authorization` may have.

        So no page of a browser acts for an operator by itself.
        """
        caller = _accepted(self.keys.find_operator(token))
        if caller is None or not is_header:
            raise RefusedLoginError(_INVALID)
        return caller

    def _is_admin_token(self, token: str) -> bool:
        sent = token.encode(errors="replace")
        return bool(self._admin_token) and hmac.compare_digest(sent, self._admin_token)

    async def _jwt_caller(self, login: JwtLogin, token: str) -> Caller:
        try:
            caller = await login.login(token)
        except IssuerUnreachableError:
            raise web.HTTPServiceUnavailable(
                text="the keys of the issuer of JWTs cannot be fetched",
                headers={hdrs.RETRY_AFTER: _ISSUER_RETRY_S},
            ) from None
        limits = narrower(self.keys.limits_of(caller.tenant), caller.limits)
        return replace(caller, limits=limits)

    def _open_caller(self, request: web.Request) -> Caller:
        """Return the sender of a request where clients need no credential."""
        address = client_address(request)
        if self._is_local_operator:
            return LOCAL_OPERATOR if address.is_local else ANONYMOUS
        presented = bearer_token(request.headers.items())
        if presented is None:
            return ANONYMOUS
        # Clients send tokens that mean nothing here. Only a token for a route of operators is an
        # attempt to log in as one.
        is_attempt = level_of(request) in (Level.MONITOR, Level.OPERATOR)
        wait_s = self._wait_s(request)
        with contextlib.suppress(RefusedLoginError):
            if presented.startswith(KEY_PREFIX):
                return self._operator(presented, is_header=True)
        if wait_s and is_attempt:
            _refuse_for(wait_s)
        if not wait_s and self._is_admin_token(presented):
            return _BY_ADMIN_TOKEN
        if is_attempt:
            self._count_failure(request)
        return ANONYMOUS

    def _wait_s(self, request: web.Request) -> float:
        """Return the seconds for which no failed login of this network is allowed."""
        network = client_address(request).network
        return self._failed_logins.wait_s(network, self._clock.now().monotonic_s)

    def _count_failure(self, request: web.Request) -> None:
        """Count a failed login. Raises HTTPTooManyRequests if there were too many."""
        self.refused_count += 1
        network, now_s = client_address(request).network, self._clock.now().monotonic_s
        if wait_s := self._failed_logins.spend(network, now_s):
            _refuse_for(wait_s)


def _refuse_for(wait_s: float) -> NoReturn:
    seconds = max(1, math.ceil(wait_s))
    raise web.HTTPTooManyRequests(
        text=f"too many failed logins of this address; try again after {seconds} s",
        headers={hdrs.RETRY_AFTER: str(seconds)},
    )


def _accepted(found: Caller | str | None) -> Caller | None:
    """Return the caller with a key, None without one. Raises RefusedLoginError for an ended key."""
    if isinstance(found, str):
        raise RefusedLoginError(found)
    return found


def _jwt_login(settings: CredentialSettings, clock: Clock) -> JwtLogin:
    try:
        from duplane.edge.credentials.jwt_tokens import JwtLogin
        from duplane.edge.credentials.key_set import KeySet
    except ModuleNotFoundError:
        raise ValueError("jwks: PyJWT is not installed; install duplane[jwt]") from None
    return JwtLogin(settings, KeySet(settings.jwks, settings.jwt_algorithms, clock))
