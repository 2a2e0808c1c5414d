"""Verifies JWTs of an issuer, and reads from their claims who the caller is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import jwt

from duplane.edge.access import Caller, CallerKind, Scope, TenantLimits
from duplane.edge.credentials.key_set import KeySet
from duplane.edge.credentials.keys import is_limit, is_name
from duplane.edge.credentials.refusal import RefusedLoginError
from duplane.edge.credentials.settings import CredentialSettings

OPERATOR_ROLE = "operator"
_LEEWAY_S = 10.0  # difference between the clocks of the issuer and of this machine
_MAX_SUBJECT_CHARACTERS = 128
_REQUIRED = ["exp", "iss", "aud", "sub"]


@dataclass(frozen=True, slots=True)
class JwtLogin:
    """Accepts JWTs that are signed with a key of one issuer."""

    settings: CredentialSettings
    keys: KeySet

    async def login(self, token: str) -> Caller:
        """Return the caller that a token names, with the limits that its claims contain.

        Raises RefusedLoginError; IssuerUnreachableError if no key of the issuer can be used.
        """
        try:
            key_id = jwt.get_unverified_header(token).get("kid")
        except (jwt.PyJWTError, ValueError, RecursionError):
            raise RefusedLoginError("the JWT cannot be read") from None
        if not isinstance(key_id, str):
            raise RefusedLoginError("the JWT has no `kid`")
        key = await self.keys.find(key_id)
        if key is None:
            raise RefusedLoginError("the issuer has no key with the `kid` of the JWT")
        try:
            claims = jwt.decode(
                token,
                key,
                algorithms=[key.algorithm_name],
                audience=self.settings.jwt_audience,
                issuer=self.settings.jwt_issuer,
                leeway=_LEEWAY_S,
                options={"require": _REQUIRED},
            )
        except jwt.PyJWTError as error:
            raise RefusedLoginError(_REASONS.get(type(error), "the JWT is not valid")) from None
        return self._caller(claims)

    def _caller(self, claims: Mapping[str, Any]) -> Caller:
        subject = str(claims["sub"])
        if not 0 < len(subject) <= _MAX_SUBJECT_CHARACTERS or not subject.isprintable():
            raise RefusedLoginError(
                f"`sub` of the JWT must have 1 to {_MAX_SUBJECT_CHARACTERS} printable characters"
            )
        credential = f"jwt:{subject}"
        if self.settings.jwt_operators and claims.get("role") == OPERATOR_ROLE:
            return Caller(
                CallerKind.OPERATOR,
                subject=subject,
                credential=credential,
                scopes=_scopes(claims.get("scope")),
            )
        tenant = claims.get("tenant")
        if not is_name(tenant):
            raise RefusedLoginError("the JWT names no tenant in its claim `tenant`")
        record = claims.get("record")
        if record is not None and not isinstance(record, bool):
            raise RefusedLoginError("`record` of the JWT must be true or false")
        return Caller(
            CallerKind.TENANT,
            tenant=str(tenant),
            subject=subject,
            credential=credential,
            limits=_limits(claims.get("limits")),
            may_record=record,
        )


_REASONS: Mapping[type[Exception], str] = {
    jwt.ExpiredSignatureError: "the JWT has expired",
    jwt.ImmatureSignatureError: "the JWT is not valid yet",
    jwt.InvalidAudienceError: "the JWT is for another audience",
    jwt.InvalidIssuerError: "the JWT is of another issuer",
    jwt.MissingRequiredClaimError: f"the JWT must have the claims {', '.join(_REQUIRED)}",
}


def _scopes(claim: object) -> frozenset[Scope]:
    """Return the known scopes of a claim; unknown ones may belong to other services."""
    names = claim.split() if isinstance(claim, str) else []
    return frozenset(scope for scope in Scope if scope.value in names)


def _limits(claim: object) -> TenantLimits:
    if claim is None:
        return TenantLimits()
    table = cast("dict[str, Any]", claim) if isinstance(claim, dict) else {"": claim}
    counts = {name: limit for name, limit in table.items() if is_limit(limit)}
    if counts.keys() != table.keys() or not counts.keys() <= {"sessions", "waiting", "minutes"}:
        raise RefusedLoginError(
            "`limits` of the JWT must have whole numbers for sessions, waiting or minutes"
        )
    return TenantLimits(counts.get("sessions"), counts.get("waiting"), counts.get("minutes"))
