"""The key set of an issuer: which keys are used, and when it is fetched."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from jwt.algorithms import RSAAlgorithm
from support.edge.jwt_issuer import JwtIssuer
from support.edge.live_edge import HandSetClock
from support.fabric.in_process import no_task_left

from duplane.edge.credentials.key_set import (
    KEEP_S,
    MAX_BYTES,
    UNKNOWN_INTERVAL_S,
    FetchError,
    KeySet,
    fetch,
    parse_key_set,
)
from duplane.edge.credentials.refusal import IssuerUnreachableError
from duplane.edge.credentials.settings import JWT_ALGORITHMS

ISSUER = JwtIssuer(*JWT_ALGORITHMS)


def parsed(*keys: Any, algorithms: tuple[str, ...] = JWT_ALGORITHMS) -> set[str]:
    return {*parse_key_set(orjson.dumps({"keys": keys}), algorithms)}


def test_each_key_has_the_algorithm_of_its_type() -> None:
    keys = parse_key_set(ISSUER.key_set(), JWT_ALGORITHMS)
    assert {name: key.algorithm_name for name, key in keys.items()} == {
        name: name for name in JWT_ALGORITHMS
    }


@pytest.mark.parametrize(
    "key",
    [
        {"kty": "oct", "k": "AAAA", "kid": "x", "alg": "HS256"},
        ISSUER.jwk("RS256", alg="HS256"),
        ISSUER.jwk("RS256", alg="PS256"),
        ISSUER.jwk("ES256", use="enc"),
        ISSUER.jwk("ES256", kid=None),
        ISSUER.jwk("ES256", kid=7),
        ISSUER.jwk("ES256", crv="P-384"),
        ISSUER.jwk("ES256", crv=["P-256"]),
        ISSUER.jwk("ES256", x="AAAA"),
        ISSUER.jwk("EdDSA", x=1),
        RSAAlgorithm.to_jwk(rsa.generate_private_key(65_537, 1024).public_key(), as_dict=True)
        | {"kid": "short"},
        "no object",
        None,
    ],
    ids=str.split(
        "oct hs256 ps256 encryption no_id number_as_id other_curve list_as_curve bad_x"
        " number_as_x short_rsa text none"
    ),
)
def test_unusable_key_is_left_out(key: Any) -> None:
    assert parsed(key, ISSUER.jwk("EdDSA", kid="good")) == {"good"}


def test_key_of_an_algorithm_that_is_not_accepted_is_left_out() -> None:
    keys = [ISSUER.jwk(name) for name in JWT_ALGORITHMS]
    assert parsed(*keys, algorithms=("ES256",)) == {"ES256"}


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"keys":{}}', b'{"keys":[]}', b"\xff"])
def test_other_documents_are_no_key_sets(body: bytes) -> None:
    with pytest.raises(FetchError):
        parse_key_set(body, JWT_ALGORITHMS)


async def test_body_is_fetched_within_its_bounds() -> None:
    async with JwtIssuer().serving() as issuer:
        assert await fetch(issuer.url) == issuer.key_set()
        issuer.body = b" " * (MAX_BYTES + 1)
        with pytest.raises(FetchError, match="more than"):
            await fetch(issuer.url)
        issuer.body = None
        for issuer.status in (500, 302):
            with pytest.raises(FetchError, match="status"):
                await fetch(issuer.url)
    with pytest.raises(FetchError, match="cannot be reached"):
        await fetch(issuer.url)


class Rig:
    """A key set whose issuer and clock a test controls."""

    def __init__(self) -> None:
        self.clock = HandSetClock()
        self.issuer = JwtIssuer()
        self.is_up = True
        self.answers = asyncio.Event()
        self.answers.set()
        self.keys = KeySet("https://issuer.example/jwks", JWT_ALGORITHMS, self.clock, self.get)

    async def get(self, _: str) -> bytes:
        self.issuer.fetch_count += 1
        await self.answers.wait()
        if not self.is_up:
            raise FetchError("down")
        return self.issuer.key_set()

    async def has(self, key_id: str) -> bool:
        return await self.keys.find(key_id) is not None


async def test_flood_of_unknown_key_ids_causes_one_fetch_in_30_seconds() -> None:
    rig = Rig()
    assert await rig.has("ES256")
    for each in range(100):
        assert not await rig.has(f"unknown {each}")
    assert rig.issuer.fetch_count == 1
    rig.clock.advance(UNKNOWN_INTERVAL_S)
    assert not await rig.has("unknown")
    assert not await rig.has("unknown")
    assert rig.issuer.fetch_count == 2


async def test_requests_at_the_same_time_share_one_fetch() -> None:
    rig = Rig()
    rig.answers.clear()
    asking = [asyncio.create_task(rig.has("ES256")) for _ in range(20)]
    await asyncio.sleep(0)
    asking[0].cancel()
    await asyncio.wait({asking[0]})
    rig.answers.set()
    assert all(await asyncio.gather(*asking[1:]))
    assert rig.issuer.fetch_count == 1


async def test_new_key_of_the_issuer_is_found() -> None:
    rig = Rig()
    assert await rig.has("ES256")
    rig.issuer = JwtIssuer("ES256", "EdDSA")
    rig.clock.advance(UNKNOWN_INTERVAL_S)
    assert await rig.has("EdDSA")


async def test_keys_stay_24_hours_while_the_issuer_is_down() -> None:
    rig = Rig()
    assert await rig.has("ES256")
    rig.is_up = False
    rig.clock.advance(KEEP_S)
    assert await rig.has("ES256")
    rig.clock.advance(1)
    with pytest.raises(IssuerUnreachableError):
        await rig.has("ES256")
    rig.is_up = True
    rig.clock.advance(UNKNOWN_INTERVAL_S)
    assert await rig.has("ES256")


async def test_issuer_that_never_answered_is_asked_again_after_30_seconds() -> None:
    rig = Rig()
    rig.is_up = False
    for _ in range(3):
        with pytest.raises(IssuerUnreachableError):
            await rig.has("ES256")
    assert rig.issuer.fetch_count == 1
    rig.is_up = True
    rig.clock.advance(UNKNOWN_INTERVAL_S)
    assert await rig.has("ES256")


async def test_keys_are_fetched_at_the_start_and_no_task_stays() -> None:
    rig = Rig()
    rig.answers.clear()
    with no_task_left("duplane/edge/"):
        async with rig.keys.refreshed():
            found = asyncio.create_task(rig.has("ES256"))
            await asyncio.sleep(0)
            rig.answers.set()
            assert await found
    assert rig.issuer.fetch_count == 1
