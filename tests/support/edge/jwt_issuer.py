"""An issuer of JWTs for tests: its keys, its key set, and tokens with any header and claims."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import jwt
import orjson
from aiohttp import web
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

ISSUER = "https://issuer.example"
AUDIENCE = "duplane"
_ALGORITHMS = {"ES256": ECAlgorithm, "EdDSA": OKPAlgorithm, "RS256": RSAAlgorithm}


def unix_s() -> int:
    """Return the Unix time."""
    return time.time_ns() // 10**9


class JwtIssuer:
    """Signs tokens and serves its key set. `fetch_count` counts the fetches."""

    def __init__(self, *algorithms: str) -> None:
        self.fetch_count = 0
        self.status = 200
        self.body: bytes | None = None  # instead of the key set
        self.private = {name: _new_key(name) for name in algorithms or ("ES256",)}
        self.url = ""

    def jwk(self, algorithm: str = "ES256", **fields: Any) -> dict[str, Any]:
        """Return the public key of an algorithm; its id is the name of the algorithm."""
        public = self.private[algorithm].public_key()
        document = _ALGORITHMS[algorithm].to_jwk(public, as_dict=True)
        document.pop("key_ops", None)
        return {**document, "kid": algorithm, "use": "sig", **fields}

    def public_pem(self, algorithm: str = "ES256") -> bytes:
        """Return the public key of an algorithm as text."""
        return (
            self.private[algorithm]
            .public_key()
            .public_bytes(
                serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
            )
        )

    def key_set(self) -> bytes:
        """Return the key set as a document."""
        return orjson.dumps({"keys": [self.jwk(name) for name in self.private]})

    def claims(self, **claims: Any) -> dict[str, Any]:
        """Return claims of a valid token, changed by `claims`; None removes one."""
        valid = {
            "iss": ISSUER,
            "aud": AUDIENCE,
            "sub": "user 7",
            "exp": unix_s() + 60,
            "tenant": "acme",
            **claims,
        }
        return {name: value for name, value in valid.items() if value is not None}

    def token(
        self, algorithm: str = "ES256", headers: Mapping[str, Any] | None = None, **claims: Any
    ) -> str:
        """Return a signed token."""
        return jwt.encode(
            self.claims(**claims),
            self.private[algorithm],
            algorithm,
            headers={"kid": algorithm, **(headers or {})},
        )

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncGenerator[JwtIssuer]:
        """Serve the key set at `url` during the body of the `with`."""

        async def answer(_: web.Request) -> web.Response:
            self.fetch_count += 1
            body = self.key_set() if self.body is None else self.body
            location = {"Location": "/elsewhere"} if 300 <= self.status < 400 else None
            return web.Response(body=body, status=self.status, headers=location)

        app = web.Application()
        app.router.add_get("/jwks", answer)
        app.router.add_get("/elsewhere", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            port = runner.addresses[0][1]
            self.url = f"http://127.0.0.1:{port}/jwks"
            yield self
        finally:
            await runner.cleanup()


def _new_key(algorithm: str) -> Any:
    match algorithm:
        case "ES256":
            return ec.generate_private_key(ec.SECP256R1())
        case "EdDSA":
            return ed25519.Ed25519PrivateKey.generate()
        case "RS256":
            return rsa.generate_private_key(65_537, 2048)
        case _:
            raise ValueError(f"no key for {algorithm}")
