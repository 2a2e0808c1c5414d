"""An authenticator whose tokens are the names of callers, and HTTP requests as one of them."""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import web

from duplane.edge.access import ALL_SCOPES, Caller, CallerKind, Scope

CALLERS: Mapping[str, Caller] = {
    "tenant": Caller(CallerKind.TENANT, tenant="acme", credential="k1"),
    "operator": Caller(CallerKind.OPERATOR, credential="o1", scopes=ALL_SCOPES),
    **{
        scope.value: Caller(CallerKind.OPERATOR, credential=scope.value, scopes=frozenset({scope}))
        for scope in Scope
    },
}


class NamedCallers:
    """Accepts the tokens in CALLERS and nobody else."""

    async def authenticate(self, request: web.Request) -> Caller:
        caller = CALLERS.get(request.headers.get("Authorization", "").removeprefix("Bearer "))
        if caller is None:
            raise web.HTTPUnauthorized(
                text="a credential is needed", headers={"WWW-Authenticate": "Bearer"}
            )
        return caller


def as_caller(name: str) -> dict[str, str]:
    """Return the header of a caller; "" sends none."""
    return {"Authorization": f"Bearer {name}"} if name else {}
