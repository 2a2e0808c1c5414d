"""Lease signing: the scheduler signs leases (Ed25519), and workers verify them without a call."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)
from google.protobuf.message import DecodeError

from duplane.fabric.bounds import MAX_CLAIM_TIMEOUT_S
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.v1 import lease_pb2, registry_pb2

CLAIM_SLACK_S = 30.0  # a worker accepts a lease until so long after the claim timeout
LEASE_LIFE_S = MAX_CLAIM_TIMEOUT_S + CLAIM_SLACK_S
"""The longest time from the signature of a lease to the last moment at which it can be claimed."""

# This prefix precedes the claims in the signed bytes, so that bytes signed for another purpose
# are no lease.
_CONTEXT = b"duplane.fabric.v1.LeaseClaims\0"


class LeaseSigner:
    """Signs claims with one Ed25519 key: the given one, or a new one."""

    def __init__(self, key: Ed25519PrivateKey | None = None) -> None:
        self._key = key or Ed25519PrivateKey.generate()
        public_key = self._key.public_key().public_bytes_raw()
        key_id = hashlib.sha256(public_key).hexdigest()[:16]
        self.verification_key = registry_pb2.VerificationKey(key_id=key_id, public_key=public_key)

    def sign(self, claims: lease_pb2.LeaseClaims) -> lease_pb2.Lease:
        """Return the lease with these claims."""
        signed = claims.SerializeToString(deterministic=True)
        return lease_pb2.Lease(
            claims=signed,
            signature=self._key.sign(_CONTEXT + signed),
            key_id=self.verification_key.key_id,
        )


class LeaseVerifier:
    """Verifies signatures with the keys that the schedulers sent last.

    A key that the schedulers no longer send is trusted for another LEASE_LIFE_S, because leases
    that are signed with this key may still be on their way. Times are monotonic seconds.
    """

    def __init__(self) -> None:
        self._keys: dict[str, Ed25519PublicKey] = {}
        self._retired: dict[str, float] = {}  # key id -> time at which trust ends

    def trust(self, keys: Sequence[registry_pb2.VerificationKey], now: float) -> None:
        """Replace the trusted keys. Raises ValueError for a malformed key, and changes nothing."""
        latest = {key.key_id: Ed25519PublicKey.from_public_bytes(key.public_key) for key in keys}
        missing = dict.fromkeys(self._keys.keys() - latest.keys(), now + LEASE_LIFE_S)
        ends = {**missing, **self._retired}  # keep an end that was set before
        self._retired = {
            key_id: end for key_id, end in ends.items() if end > now and key_id not in latest
        }
        self._keys = {**{key_id: self._keys[key_id] for key_id in self._retired}, **latest}

    def verify(self, lease: lease_pb2.Lease, now: float) -> lease_pb2.LeaseClaims:
        """Return the claims of a lease. Raises FabricError with the reason LEASE_FORGED."""
        key = self._keys.get(lease.key_id)
        if key is None or self._retired.get(lease.key_id, now) < now:
            raise FabricError(Reason.LEASE_FORGED, "the lease is signed with an unknown key")
        try:
            key.verify(lease.signature, _CONTEXT + lease.claims)
            return lease_pb2.LeaseClaims.FromString(lease.claims)
        except (InvalidSignature, DecodeError):
            raise FabricError(Reason.LEASE_FORGED, "the lease's signature does not match") from None
