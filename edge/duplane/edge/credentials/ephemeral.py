"""Ephemeral tokens: short-lived, signed, and each for one session of a browser.

A server with an API key asks for a token and gives it to a browser, so that the browser needs no
key. The token has all that the edge must know, so edges that share the signing key need no store.
`UsedTokens` makes each token open only one session per edge.
"""

from __future__ import annotations

import heapq
import secrets
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import orjson
import pybase64
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from duplane.edge.access import TenantLimits
from duplane.edge.credentials.carriers import EPHEMERAL_PREFIX
from duplane.fabric.secret_files import check_secret_file

MIN_S, DEFAULT_S, MAX_S = 10, 60, 7200
MAX_USED_COUNT = 100_000  # about 20 MB
MAX_TENANT_USED_COUNT = MAX_USED_COUNT // 10  # so that one tenant takes no token from another

_CONTEXT = b"duplane ephemeral token 1:"  # signed too, so that no other signature fits


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """What an ephemeral token allows. A text that is empty does not restrict its use."""

    token_id: str
    expires_s: int  # Unix time until which a session can begin
    tenant: str = ""
    credential: str = ""  # id of the credential that asked for the token; it can be revoked
    subject: str = ""  # the tenant's own id of its user
    mode: str = ""
    origin: str = ""
    limits: TenantLimits = field(default_factory=TenantLimits)
    may_record: bool | None = None


class TokenSigner:
    """Makes and verifies ephemeral tokens with one key."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._private = key
        self._public = key.public_key()

    @classmethod
    def load(cls, path: Path | None) -> TokenSigner:
        """Return a signer with the key in a file, or with a random key without a file.

        Raises ValueError.
        """
        if path is None:
            return cls(Ed25519PrivateKey.generate())
        check_secret_file(path, "token_key_file")
        try:
            key = load_pem_private_key(path.read_bytes(), password=None)
        except (OSError, ValueError, TypeError):  # TypeError: the key has a password
            raise ValueError(f"token_key_file: {path} is no private key in PEM") from None
        if not isinstance(key, Ed25519PrivateKey):
            raise ValueError(f"token_key_file: {path} has no Ed25519 key")
        return cls(key)

    def sign(self, grant: Grant) -> str:
        """Return the token of a grant."""
        limits = grant.limits
        content = pybase64.urlsafe_b64encode(
            orjson.dumps(
                {
                    "i": grant.token_id,
                    "e": grant.expires_s,
                    "t": grant.tenant,
                    "c": grant.credential,
                    "s": grant.subject,
                    "m": grant.mode,
                    "o": grant.origin,
                    "l": [limits.session_count, limits.waiting_count, limits.minutes],
                    "r": grant.may_record,
                }
            )
        ).rstrip(b"=")
        signature = self._private.sign(_CONTEXT + content)
        text = pybase64.urlsafe_b64encode(signature).rstrip(b"=")
        return f"{EPHEMERAL_PREFIX}{content.decode()}.{text.decode()}"

    def verify(self, token: str) -> Grant | None:
        """Return the grant of a token with a valid signature, which may have expired."""
        content, _, signature = token.removeprefix(EPHEMERAL_PREFIX).partition(".")
        try:
            self._public.verify(_decode(signature), _CONTEXT + content.encode("ascii"))
            fields = cast("Mapping[str, Any]", orjson.loads(_decode(content)))
        except (InvalidSignature, ValueError):
            return None
        return Grant(
            token_id=fields["i"],
            expires_s=fields["e"],
            tenant=fields["t"],
            credential=fields["c"],
            subject=fields["s"],
            mode=fields["m"],
            origin=fields["o"],
            limits=TenantLimits(*fields["l"]),
            may_record=fields["r"],
        )


def new_token_id() -> str:
    """Return the id of a new token."""
    return secrets.token_hex(8)


def _decode(text: str) -> bytes:
    """Decode base64 without padding. Raises ValueError; UnicodeEncodeError is one, too."""
    padded = text.encode("ascii") + b"=" * (-len(text) % 4)
    return pybase64.b64decode(padded, altchars=b"-_", validate=True)


class UsedTokens:
    """The ids of tokens that have opened a session, until the tokens expire.

    There are at most `max_count`, and of one tenant at most `max_tenant_count`. While there are as
    many, no further token is accepted, because the edge could not remember that it was used.
    """

    def __init__(
        self, max_count: int = MAX_USED_COUNT, max_tenant_count: int = MAX_TENANT_USED_COUNT
    ) -> None:
        self._max_count = max_count
        self._max_tenant_count = max_tenant_count
        self._tenants: dict[str, str] = {}  # by the id of a token
        self._counts: Counter[str] = Counter()  # by tenant
        self._by_expiry: list[tuple[int, str]] = []

    def has_room(self, tenant: str, now_s: float) -> bool:
        """Forget tokens that have expired; return whether a further one of a tenant can be used."""
        while self._by_expiry and self._by_expiry[0][0] <= now_s:
            _, token_id = heapq.heappop(self._by_expiry)
            self._forget(self._tenants.pop(token_id))
        is_below = self._counts[tenant] < self._max_tenant_count
        return is_below and len(self._tenants) < self._max_count

    def _forget(self, tenant: str) -> None:
        self._counts[tenant] -= 1
        if not self._counts[tenant]:
            del self._counts[tenant]

    def use(self, grant: Grant) -> bool:
        """Note that a token is used; return False if it was used before."""
        if grant.token_id in self._tenants:
            return False
        self._tenants[grant.token_id] = grant.tenant
        self._counts[grant.tenant] += 1
        heapq.heappush(self._by_expiry, (grant.expires_s, grant.token_id))
        return True
