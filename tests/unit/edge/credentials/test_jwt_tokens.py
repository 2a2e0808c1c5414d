"""JWTs: which are accepted, and which caller their claims name."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import Any

import jwt
import orjson
import pybase64
import pytest
from support.edge.jwt_issuer import AUDIENCE, ISSUER, JwtIssuer, unix_s

from duplane.edge.access import Caller, CallerKind, Scope, TenantLimits
from duplane.edge.clock import LoopClock
from duplane.edge.credentials.jwt_tokens import JwtLogin
from duplane.edge.credentials.key_set import KeySet
from duplane.edge.credentials.refusal import RefusedLoginError
from duplane.edge.credentials.settings import JWT_ALGORITHMS, CredentialSettings

KEYS = JwtIssuer(*JWT_ALGORITHMS)


def login(token: str, **settings: Any) -> Any:
    """Log in with a token at an edge that accepts all algorithms."""

    async def get(_: str) -> bytes:
        return KEYS.key_set()

    chosen = CredentialSettings(
        jwks="https://issuer.example/jwks", jwt_issuer=ISSUER, jwt_audience=AUDIENCE, **settings
    )
    keys = KeySet(chosen.jwks, chosen.jwt_algorithms, LoopClock(), get)
    return JwtLogin(chosen, keys).login(token)


@pytest.mark.parametrize("algorithm", JWT_ALGORITHMS)
async def test_token_of_the_issuer_names_tenant_and_user(algorithm: str) -> None:
    assert await login(KEYS.token(algorithm)) == Caller(
        CallerKind.TENANT, tenant="acme", subject="user 7", credential="jwt:user 7"
    )


async def test_claims_limit_and_record() -> None:
    claims = {"limits": {"sessions": 1, "minutes": 5}, "record": False}
    caller = await login(KEYS.token(**claims))
    assert caller.limits == TenantLimits(1, None, 5)
    assert caller.may_record is False


async def test_role_of_an_operator_counts_only_if_the_setting_allows_it() -> None:
    claims = {"role": "operator", "scope": "read sessions openid", "tenant": None}
    with pytest.raises(RefusedLoginError, match="names no tenant"):
        await login(KEYS.token(**claims))
    caller = await login(KEYS.token(**claims), jwt_operators=True)
    assert caller.kind is CallerKind.OPERATOR
    assert caller.scopes == {Scope.READ, Scope.SESSIONS}
    for role in ("admin", ["operator"]):
        token = KEYS.token(role=role)
        assert (await login(token, jwt_operators=True)).scopes == frozenset()


@pytest.mark.parametrize(
    ("claims", "said"),
    [
        ({"exp": None}, "must have the claims"),
        ({"iss": None}, "must have the claims"),
        ({"aud": None}, "must have the claims"),
        ({"sub": None}, "must have the claims"),
        ({"iss": "https://another.example"}, "another issuer"),
        ({"aud": "another"}, "another audience"),
        ({"tenant": None}, "names no tenant"),
        ({"tenant": "a b"}, "names no tenant"),
        ({"tenant": ["acme"]}, "names no tenant"),
        ({"sub": ""}, "`sub`"),
        ({"sub": "a\nb"}, "`sub`"),
        ({"sub": "x" * 129}, "`sub`"),
        ({"record": "no"}, "`record`"),
        ({"limits": {"sessions": -1}}, "`limits`"),
        ({"limits": {"sessions": True}}, "`limits`"),
        ({"limits": {"others": 1}}, "`limits`"),
        ({"limits": {"sessions": 10**10}}, "`limits`"),
        ({"limits": 4}, "`limits`"),
    ],
)
async def test_token_with_bad_claims_is_refused(claims: dict[str, Any], said: str) -> None:
    with pytest.raises(RefusedLoginError, match=said):
        await login(KEYS.token(**claims))


async def test_token_is_refused_before_and_after_its_time() -> None:
    with pytest.raises(RefusedLoginError, match="has expired"):
        await login(KEYS.token(exp=unix_s() - 60))
    with pytest.raises(RefusedLoginError, match="not valid yet"):
        await login(KEYS.token(nbf=unix_s() + 60))


def encoded(content: bytes) -> bytes:
    return pybase64.urlsafe_b64encode(content).rstrip(b"=")


def signed(header: dict[str, str], sign: Callable[[bytes], bytes]) -> str:
    """Return a token as an attacker makes it, without the checks of a library."""
    content = encoded(orjson.dumps(header)) + b"." + encoded(orjson.dumps(KEYS.claims()))
    return (content + b"." + encoded(sign(content))).decode()


def with_public_key_as_secret(algorithm: str) -> str:
    secret = KEYS.public_pem(algorithm)
    header = {"alg": "HS256", "kid": algorithm}
    return signed(header, lambda content: hmac.digest(secret, content, "sha256"))


FORGED = {
    "no signature": signed({"alg": "none", "kid": "ES256"}, lambda _: b""),
    "cut signature": KEYS.token().rpartition(".")[0] + ".",
    "of another issuer": JwtIssuer().token(),
    "HS256 with the public key of ES256": with_public_key_as_secret("ES256"),
    "HS256 with the public key of RS256": with_public_key_as_secret("RS256"),
    "key id of another key": KEYS.token("EdDSA", {"kid": "ES256"}),
    "unknown key id": KEYS.token(headers={"kid": "unknown"}),
    "no key id": jwt.encode(KEYS.claims(), KEYS.private["ES256"], "ES256"),
    "critical header": KEYS.token(headers={"crit": ["x"], "x": 1}),
    "key in the header": KEYS.token(headers={"kid": "mine", "jwk": KEYS.jwk()}),
    "no JWT": "a.b.c",
    "deep header": encoded(b"[" * 6000).decode() + ".e30.",
    "header that is no object": encoded(b"[1]").decode() + ".e30.",
    "not ASCII": "\udcff.ü.",
    "empty": "",
    "two parts": "a.b",
}


@pytest.mark.parametrize("name", FORGED)
async def test_forged_token_is_refused(name: str) -> None:
    with pytest.raises(RefusedLoginError) as refused:
        await login(FORGED[name])
    assert not FORGED[name] or FORGED[name] not in str(refused.value)


async def test_algorithm_that_is_not_accepted_is_refused() -> None:
    with pytest.raises(RefusedLoginError):
        await login(KEYS.token("RS256"), jwt_algorithms=("ES256",))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"jwks": "http://issuer.example/jwks"}, "jwks must be"),
        ({"jwks": "https:///jwks"}, "jwks must be"),
        ({"jwks": "https://user:word@issuer.example/"}, "jwks must be"),
        ({"jwks": "file:///etc/passwd"}, "jwks must be"),
        ({"jwt_issuer": ""}, "jwt_issuer must be set"),
        ({"jwt_audience": ""}, "jwt_audience must be set"),
        ({"jwt_algorithms": ()}, "jwt_algorithms is empty"),
        ({"jwt_algorithms": ("ES256", "HS256")}, "jwt_algorithms has 'HS256'"),
        ({"jwt_algorithms": ("none",)}, "jwt_algorithms has 'none'"),
        ({"auth": "none"}, "auth is none"),
        ({"jwks": ""}, "jwks must be set"),
        ({"jwks": "", "jwt_issuer": "", "jwt_audience": "", "auth": "keys"}, "auth is keys"),
    ],
)
def test_contradicting_settings_are_refused(settings: dict[str, Any], said: str) -> None:
    valid: dict[str, Any] = {
        "jwks": "http://localhost:1/jwks",
        "jwt_issuer": "i",
        "jwt_audience": "a",
    }
    assert CredentialSettings(**valid).are_required
    with pytest.raises(ValueError, match=said):
        CredentialSettings(**{**valid, **settings})
