"""What strangers try with tokens of an issuer (JWT)."""

from __future__ import annotations

import asyncio
import hmac
from typing import Any

import orjson
import pybase64
from support.edge.credential_rig import answer, bearer, carriers, refusal
from support.edge.jwt_issuer import AUDIENCE, ISSUER, JwtIssuer, unix_s
from support.edge.live_edge import live_edge

from duplane.edge.credentials.settings import CredentialSettings


def issued(issuer: JwtIssuer, **settings: Any) -> CredentialSettings:
    return CredentialSettings(jwks=issuer.url, jwt_issuer=ISSUER, jwt_audience=AUDIENCE, **settings)


def encoded(content: object) -> str:
    return pybase64.urlsafe_b64encode(orjson.dumps(content)).rstrip(b"=").decode()


async def test_token_opens_a_session_and_forged_ones_do_not() -> None:
    async with JwtIssuer("ES256", "RS256").serving() as issuer:
        body = encoded(issuer.claims())
        unsigned = f"{encoded({'alg': 'none', 'kid': 'ES256'})}.{body}."
        hs256 = f"{encoded({'alg': 'HS256', 'kid': 'RS256'})}.{body}"
        signature = hmac.digest(issuer.public_pem("RS256"), hs256.encode(), "sha256")
        forged = (
            unsigned,
            f"{hs256}.{pybase64.urlsafe_b64encode(signature).rstrip(b'=').decode()}",
            JwtIssuer().token(),
            issuer.token(exp=unix_s() - 60),
            issuer.token(exp=None),
            issuer.token(aud="another"),
            issuer.token(iss="https://evil.example"),
            issuer.token(headers={"jku": "https://evil.example/jwks", "kid": "evil"}),
        )
        async with live_edge(credentials=issued(issuer)) as edge:
            for name, how in carriers(edge, issuer.token("RS256")).items():
                assert await refusal(edge, **how) == 0, name
            for number, token in enumerate(forged):
                place = list(carriers(edge, token).values())[number % 5]
                assert await refusal(edge, **place) == 401, number


async def test_operator_of_the_issuer_counts_only_if_allowed_and_only_in_the_header() -> None:
    async with JwtIssuer().serving() as issuer:
        token = issuer.token(role="operator", scope="read")
        async with live_edge(credentials=issued(issuer)) as edge:
            assert (await answer(edge, "GET", "/workers", headers=bearer(token)))[0] == 403
        async with live_edge(credentials=issued(issuer, jwt_operators=True)) as edge:
            assert (await answer(edge, "GET", "/workers", headers=bearer(token)))[0] == 200
            assert await refusal(edge, protocols=[f"duplane.bearer.{token}"]) == 401


async def test_flood_of_unknown_key_ids_does_not_reach_the_issuer() -> None:
    async with JwtIssuer().serving() as issuer, live_edge(credentials=issued(issuer)) as edge:
        assert await refusal(edge, headers=bearer(issuer.token())) == 0
        before = issuer.fetch_count
        flood = [bearer(issuer.token(headers={"kid": f"k{each}"})) for each in range(30)]
        codes = await asyncio.gather(*(refusal(edge, headers=each) for each in flood))
        assert {*codes} == {401, 429}
        assert issuer.fetch_count <= before + 1
        # The flood locks out nobody with a valid token at its address.
        assert await refusal(edge, headers=bearer(issuer.token())) == 0


async def test_issuer_that_is_down_is_no_fault_of_the_client() -> None:
    issuer = JwtIssuer()
    issuer.status = 500
    async with issuer.serving(), live_edge(credentials=issued(issuer)) as edge:
        code, _, headers = await answer(edge, "GET", "/api/presets", headers=bearer(issuer.token()))
        assert (code, headers["Retry-After"]) == (503, "30")
