"""Who sends a request to the edge, and what a route demands of the sender."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from typing import Protocol

from aiohttp import web

from duplane.edge.transport.client_address import ClientAddress

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_MAX_LOGGED_CHARACTERS = 200


class Level(Enum):
    """Who may use a route."""

    PUBLIC = auto()
    """Everybody, also without a credential. The answer has no details."""
    CLIENT = auto()
    """Everybody whom the authenticator accepts."""
    MONITOR = auto()
    """Operators who may read."""
    OPERATOR = auto()
    """Operators with the scope of the route. Each request is an action in the audit log."""


class Scope(StrEnum):
    """What an operator may do. The values are those of files of keys and of claims."""

    READ = "read"
    """Read lists with the ids of sessions and the addresses of workers."""
    DRAIN = "drain"
    """Drain workers, and change what the edge serves: kinds of session, estimates of waits."""
    RECORDINGS = "recordings"
    """Read, change and delete recordings."""
    VOICES = "voices"
    """Read, upload and delete reference voices."""
    SESSIONS = "sessions"
    """End sessions and cancel tickets."""


ALL_SCOPES = frozenset(Scope)


def quoted(text: str) -> str:
    """Return a text on one line, in quotes, without characters that imitate another field."""
    return ascii(text[:_MAX_LOGGED_CHARACTERS])


class CallerKind(Enum):
    """The kinds of senders."""

    ANONYMOUS = auto()
    """A client without a credential, accepted because no credential is demanded."""
    TENANT = auto()
    OPERATOR = auto()


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """The limits of a tenant over all edges. None means unlimited."""

    session_count: int | None = None
    """Sessions at the same time."""
    waiting_count: int | None = None
    """Sessions in the queue at the same time."""
    minutes: int | None = None
    """Minutes of sessions in one day."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request. It does not change while its session runs."""

    kind: CallerKind
    tenant: str = ""
    """Id of the tenant. Empty without one."""
    subject: str = ""
    """The tenant's own id of its user, by which recordings are erased. Empty if unknown."""
    credential: str = ""
    """Id of the key or token, for audit lines and revocation. It is no secret. Empty without one"""
    scopes: frozenset[Scope] = frozenset()
    """What an operator may do. Empty for all others."""
    expires_s: float | None = None
    """When the credential ends, by `time.monotonic`. None if it does not end."""
    limits: TenantLimits = field(default_factory=TenantLimits)
    may_record: bool | None = None
    """Whether sessions must be recorded (True) or must not (False). None: the settings decide."""

    @property
    def logged(self) -> str:
        """The tenant and the id of the credential for the log; empty without a credential."""
        if self is LOCAL_OPERATOR:
            return ""
        facts = {"tenant": self.tenant, "credential": self.credential}
        named = ", ".join(f"{name} {quoted(text)}" for name, text in facts.items() if text)
        return f" ({named})" if named else ""

    def permits(self, level: Level, scope: Scope) -> bool:
        """Return whether this sender may use a route of this level and scope."""
        match level:
            case Level.PUBLIC | Level.CLIENT:
                return True
            case Level.MONITOR:
                return Scope.READ in self.scopes
            case Level.OPERATOR:
                return scope in self.scopes


ANONYMOUS = Caller(CallerKind.ANONYMOUS)
# A process of the edge's own machine, where clients need no credential.
LOCAL_OPERATOR = Caller(CallerKind.OPERATOR, credential="this machine", scopes=ALL_SCOPES)


class Authenticator(Protocol):
    """Finds out who sends a request."""

    async def authenticate(self, request: web.Request) -> Caller:
        """Return the sender; `client_address(request)` is its address, `level_of(request)` what its
        route demands.

        This method is called once for each request, before the handler and before an upgrade, also
        for public routes. Raises HTTPException: 401 without a valid credential if one is demanded,
        400 if the credentials contradict each other, 429 after too many failures. The text of the
        exception is sent as `detail`, its headers `Retry-After` and `WWW-Authenticate` are sent,
        too.
        """
        ...


_CALLER = web.RequestKey("caller", Caller)
_ADDRESS = web.RequestKey("client address", ClientAddress)
_LEVEL = web.RequestKey("level", Level)


def set_client_address(request: web.Request, address: ClientAddress) -> None:
    """Store the address of the sender, for all later steps."""
    request[_ADDRESS] = address


def client_address(request: web.Request) -> ClientAddress:
    """Return the address of the sender; trusted proxies are taken into account."""
    return request[_ADDRESS]


def set_level(request: web.Request, level: Level) -> None:
    """Store who may use the route of a request."""
    request[_LEVEL] = level


def level_of(request: web.Request) -> Level:
    """Return who may use the route of a request."""
    return request[_LEVEL]


def set_caller(request: web.Request, caller: Caller) -> None:
    """Store the sender, for the handler and its session."""
    request[_CALLER] = caller


def find_caller(request: web.Request) -> Caller | None:
    """Return the sender. None if it sent no valid credential, which only public routes allow."""
    return request.get(_CALLER)


def caller_of(request: web.Request) -> Caller:
    """Return the sender of a request to a route that is not public."""
    return request[_CALLER]
