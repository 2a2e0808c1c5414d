"""Every route with every kind of credential, also with those that are no longer valid."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.edge.credential_rig import KeyStore, bearer, make_token
from support.edge.jwt_issuer import AUDIENCE, ISSUER, JwtIssuer, unix_s
from support.edge.live_edge import HandSetClock, live_edge

from duplane.edge.access import Level, Scope
from duplane.edge.credentials.keys import new_key
from duplane.edge.credentials.settings import CredentialSettings
from duplane.edge.http.http_route import HttpRoute
from duplane.edge.routing import HTTP_CHAT_PATHS, Route

ADMIN_TOKEN = "0123456789"
SESSIONS = {*HTTP_CHAT_PATHS, *(route.value for route in Route)}
UNAUTHORIZED = ("none", "unknown", "expired", "disabled", "revoked", "expired token")
TENANTS = ("tenant", "tenant by token")
OPERATORS = ("operator", "operator by token", "admin token")


@pytest.fixture
def store(tmp_path: Path) -> KeyStore:
    return KeyStore(tmp_path)


@pytest.fixture
def operators(tmp_path: Path) -> KeyStore:
    return KeyStore(tmp_path, "operators.toml", head="")


def all_headers(
    store: KeyStore, operators: KeyStore, issuer: JwtIssuer
) -> dict[str, dict[str, str]]:
    """Return the headers with each kind of credential."""
    every = " ".join(Scope)
    listed = ", ".join(f'"{scope}"' for scope in Scope)
    revoked = store.new("left")
    store.remove(revoked)
    tokens = {
        "unknown": new_key().text,
        "expired": store.new(rest="expires = 2020-01-01T00:00:00Z").text,
        "disabled": store.new(rest="disabled = true").text,
        "revoked": revoked.text,
        "expired token": issuer.token(exp=unix_s() - 60),
        "tenant": store.new().text,
        "tenant by token": issuer.token(),
        "reader": operators.add('operator = "eve"\nscopes = ["read"]').text,
        "operator": operators.add(f'operator = "adam"\nscopes = [{listed}]').text,
        "operator by token": issuer.token(role="operator", scope=every),
        "admin token": ADMIN_TOKEN,
    }
    cookie = {"Cookie": f"__Host-duplane={tokens['tenant']}"}
    return {"none": {}, "cookie": cookie} | {name: bearer(tokens[name]) for name in tokens}


def expected(route: HttpRoute, name: str) -> int:
    """Return the status of a refusal; 0 if the route must be reached."""
    match route.level:
        case Level.PUBLIC:
            return 0
        case _ if name in UNAUTHORIZED:
            return 401
        case _ if name == "cookie":  # a cookie without an origin
            return 403
        case Level.CLIENT if name == "ephemeral":
            return 0 if route.path in SESSIONS else 403
        case Level.CLIENT:
            return 403 if "secrets" in route.path and name not in TENANTS else 0
        case _:
            is_reader = name == "reader" and route.scope is Scope.READ
            return 0 if name in OPERATORS or is_reader else 403


async def test_each_route_with_each_kind_of_credential(
    store: KeyStore, operators: KeyStore
) -> None:
    clock = HandSetClock()
    async with JwtIssuer().serving() as issuer, aiohttp.ClientSession() as client:
        headers = all_headers(store, operators, issuer)
        settings = CredentialSettings(
            api_keys=store.path,
            operator_keys=operators.path,
            jwks=issuer.url,
            jwt_issuer=ISSUER,
            jwt_audience=AUDIENCE,
            jwt_operators=True,
        )
        async with live_edge(credentials=settings, admin_token=ADMIN_TOKEN, clock=clock) as edge:
            key = headers["tenant"]["Authorization"].split()[1]
            token = await make_token(edge, key, expires_after={"seconds": 7200})
            for route in edge.edge.routes:
                url = f"http://{edge.edge.address}" + re.sub(r"\{[^}]*\}", "x", route.path)
                body: dict[str, Any] = {"json": {}} if route.method in ("POST", "PUT") else {}
                if route.takes_form:
                    body = {"data": aiohttp.MultipartWriter("form-data")}
                for name in (*headers, "ephemeral"):
                    clock.advance(6)  # ten failed logins a minute are allowed
                    sent = headers.get(name) or ({} if name == "none" else bearer(token))
                    async with client.request(route.method, url, headers=sent, **body) as answer:
                        status = answer.status
                    wanted = expected(route, name)
                    told = f"{route.method} {route.path} with {name}: {status}"
                    assert status == wanted if wanted else status not in (401, 403), told
                if route.path in HTTP_CHAT_PATHS:
                    token = await make_token(
                        edge, key, expires_after={"seconds": 7200}
                    )  # the chat has used the token
