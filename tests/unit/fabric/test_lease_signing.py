"""Signed leases verify. Changed leases and leases signed with unknown keys are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.lease_signing import LEASE_LIFE_S, LeaseSigner, LeaseVerifier
from duplane.fabric.v1 import lease_pb2

CLAIMS = lease_pb2.LeaseClaims(lease_id="l1", worker_id="w1", slot=3, fencing_number=7)
SIGNER = LeaseSigner()
NOW = 1000.0


def trusting(*signers: LeaseSigner) -> LeaseVerifier:
    verifier = LeaseVerifier()
    verifier.trust([signer.verification_key for signer in signers], NOW)
    return verifier


def test_signed_claims_verify() -> None:
    assert trusting(SIGNER).verify(SIGNER.sign(CLAIMS), NOW) == CLAIMS


def test_lease_of_an_unknown_signer_is_forged() -> None:
    with pytest.raises(FabricError) as refused:
        trusting(LeaseSigner()).verify(SIGNER.sign(CLAIMS), NOW)
    assert refused.value.reason is Reason.LEASE_FORGED


def test_former_key_is_trusted_as_long_as_what_it_has_signed() -> None:
    verifier = trusting(SIGNER)
    lease = SIGNER.sign(CLAIMS)
    verifier.trust([LeaseSigner().verification_key], NOW)
    verifier.trust([LeaseSigner().verification_key], NOW + LEASE_LIFE_S - 1)
    assert verifier.verify(lease, NOW + LEASE_LIFE_S) == CLAIMS
    with pytest.raises(FabricError):
        verifier.verify(lease, NOW + LEASE_LIFE_S + 1)
    verifier.trust([], NOW + LEASE_LIFE_S + 1)
    assert SIGNER.verification_key.key_id not in verifier._keys


def test_key_that_is_sent_again_stays_trusted() -> None:
    verifier = trusting(SIGNER)
    verifier.trust([], NOW)
    verifier.trust([SIGNER.verification_key], NOW + 1)
    assert verifier.verify(SIGNER.sign(CLAIMS), NOW + 10 * LEASE_LIFE_S) == CLAIMS


@given(position=st.integers(0, 2**16), bit=st.integers(0, 7), is_claims=st.booleans())
def test_no_flipped_bit_passes(position: int, bit: int, is_claims: bool) -> None:
    lease = SIGNER.sign(CLAIMS)
    forged = bytearray(lease.claims if is_claims else lease.signature)
    forged[position % len(forged)] ^= 1 << bit
    if is_claims:
        lease.claims = bytes(forged)
    else:
        lease.signature = bytes(forged)
    with pytest.raises(FabricError) as refused:
        trusting(SIGNER).verify(lease, NOW)
    assert refused.value.reason is Reason.LEASE_FORGED
