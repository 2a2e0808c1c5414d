"""The secret of a session's token, with which its client proves that the session is its own."""

from __future__ import annotations

import hashlib
import hmac

DIGEST_BYTES = hashlib.sha256().digest_size


def digest_of(secret: str) -> bytes:
    """Return what edges and workers keep of a secret."""
    return hashlib.sha256(secret.encode()).digest()


def is_secret_of(digest: bytes, secret: str) -> bool:
    """Return whether a digest is that of the secret. The time tells nothing about the digest."""
    return hmac.compare_digest(digest, digest_of(secret))
