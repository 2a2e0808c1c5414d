"""Settings of credentials: who may open sessions, and the files and the issuer that say so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from cyclopts import Parameter
from cyclopts.types import ExistingFile

from duplane.fabric.addresses import is_loopback
from duplane.fabric.settings import Names

# Signatures with public keys only: with HS256 the public key of the issuer would be the secret.
JWT_ALGORITHMS = ("ES256", "EdDSA", "RS256")


@Parameter(name="*", group="Credentials")
@dataclass(frozen=True, slots=True, kw_only=True)
class CredentialSettings:
    """Settings of credentials. Raises ValueError that names an unusable setting."""

    auth: Literal["keys", "none"] | None = None
    """Who may open sessions. `keys`: only callers with an API key, a JWT or an ephemeral token.
    `none`: everybody; credentials of clients are ignored. Default: `keys` if --api-keys or --jwks
    is given, otherwise `none`."""
    api_keys: ExistingFile | None = None
    """File of API keys, which `duplane keys` writes: the SHA-256 and the tenant of each key, and
    the limits of each tenant. It is read again when it changes and on SIGHUP. The sessions of a
    key that is no longer valid end with close code 1008 within 10 seconds."""
    operator_keys: ExistingFile | None = None
    """File of API keys of operators, with their scopes, written by `duplane keys`. It is read again
    like --api-keys."""
    jwks: str = ""
    """URL of the public keys (JWKS) of an issuer of JWTs, https:// only, except on this machine.
    Needs the extra `jwt`. A JWT names its tenant in the claim `tenant`."""
    jwt_issuer: str = ""
    """Issuer of JWTs: the value of their claim `iss`."""
    jwt_audience: str = ""
    """Audience of JWTs: their claim `aud` must contain this value."""
    jwt_algorithms: Names = JWT_ALGORITHMS
    """Accepted signature algorithms of JWTs: a subset of ES256, EdDSA and RS256, separated by
    commas."""
    jwt_operators: bool = False
    """Accept JWTs with the claim `role` = `operator` as credentials of operators. Their claim
    `scope` lists the scopes, separated by blanks."""
    token_key_file: ExistingFile | None = None
    """Private Ed25519 key (PEM) that signs ephemeral tokens. Edges with the same key accept each
    other's tokens. Default: a random key of this process."""

    def __post_init__(self) -> None:
        if self.auth == "none" and (self.api_keys or self.jwks):
            raise ValueError("auth is none, so neither api_keys nor jwks can be set")
        if self.auth == "keys" and not (self.api_keys or self.jwks):
            raise ValueError("auth is keys, so api_keys or jwks must be set")
        if self.jwks:
            self._check_jwt()
        elif self.jwt_issuer or self.jwt_audience or self.jwt_operators:
            raise ValueError("jwks must be set, because a setting of JWTs is set")

    def _check_jwt(self) -> None:
        url = urlsplit(self.jwks)
        is_allowed = url.scheme == "https" or (
            url.scheme == "http" and is_loopback(url.hostname or "")
        )
        if not is_allowed or not url.hostname or url.username is not None:
            raise ValueError("jwks must be a URL with https:// (http:// only for this machine)")
        for name in ("jwt_issuer", "jwt_audience"):
            if not getattr(self, name):
                raise ValueError(f"{name} must be set, because jwks is set")
        if not self.jwt_algorithms:
            raise ValueError("jwt_algorithms is empty, must name at least one")
        for algorithm in self.jwt_algorithms:
            if algorithm not in JWT_ALGORITHMS:
                raise ValueError(
                    f"jwt_algorithms has {algorithm!r}, must have only {', '.join(JWT_ALGORITHMS)}"
                )

    @property
    def are_required(self) -> bool:
        """Whether a client needs a credential."""
        return self.api_keys is not None or bool(self.jwks)
