"""Ephemeral tokens: their signature, their key, and that each is used once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from duplane.edge.access import TenantLimits
from duplane.edge.credentials.ephemeral import Grant, TokenSigner, UsedTokens, new_token_id

SIGNER = TokenSigner.load(None)
GRANT = Grant(
    token_id=new_token_id(),
    expires_s=1_800_000_000,
    tenant="acme",
    credential="dpk_0123456789ab",
    subject="user 7",
    mode="audio",
    origin="https://app.example",
    limits=TenantLimits(1, None, 3),
    may_record=False,
)


def test_token_has_its_whole_grant() -> None:
    token = SIGNER.sign(GRANT)
    assert token.startswith("ek_")
    assert SIGNER.verify(token) == GRANT


def test_token_of_another_key_is_refused() -> None:
    assert TokenSigner.load(None).verify(SIGNER.sign(GRANT)) is None


@pytest.mark.parametrize("token", ["ek_", "ek_a", "ek_.", "ek_a.b", "ek_ü.ü", "ek_!.!", "ek_..."])
def test_malformed_token_is_refused(token: str) -> None:
    assert SIGNER.verify(token) is None


@given(st.data())
def test_changed_token_is_refused(data: st.DataObject) -> None:
    content, _, signature = SIGNER.sign(GRANT).removeprefix("ek_").partition(".")
    at = data.draw(st.integers(0, len(content) - 1))
    letter = data.draw(st.sampled_from("ABCabc019-_").filter(lambda each: each != content[at]))
    changed = f"ek_{content[:at]}{letter}{content[at + 1 :]}.{signature}"
    assert SIGNER.verify(changed) is None


def pem(key: Ed25519PrivateKey, password: bytes | None = None) -> bytes:
    encryption = (
        serialization.BestAvailableEncryption(password)
        if password
        else serialization.NoEncryption()
    )
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption
    )


def written(path: Path, content: bytes) -> Path:
    path.touch(0o600)
    path.write_bytes(content)
    return path


def test_edges_with_one_key_accept_each_others_tokens(tmp_path: Path) -> None:
    path = written(tmp_path / "key", pem(Ed25519PrivateKey.generate()))
    assert TokenSigner.load(path).verify(TokenSigner.load(path).sign(GRANT)) == GRANT


def test_unusable_key_file_is_named(tmp_path: Path) -> None:
    p256 = generate_private_key(SECP256R1()).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    with_password = pem(Ed25519PrivateKey.generate(), os.urandom(8))
    for index, content in enumerate((b"", b"nothing", p256, with_password)):
        path = written(tmp_path / str(index), content)
        with pytest.raises(ValueError, match=f"token_key_file: {path}"):
            TokenSigner.load(path)
    public = written(tmp_path / "public", pem(Ed25519PrivateKey.generate()))
    public.chmod(0o644)
    with pytest.raises(ValueError, match="token_key_file: other users may read"):
        TokenSigner.load(public)


def grant(token_id: str, expires_s: int, tenant: str = "t") -> Grant:
    return Grant(token_id=token_id, expires_s=expires_s, tenant=tenant)


def test_token_is_used_once_and_remembered_until_it_expires() -> None:
    used = UsedTokens(max_count=2, max_tenant_count=2)
    assert used.has_room("t", 0)
    assert used.use(grant("a", 20))
    assert not used.use(grant("a", 20))
    assert used.use(grant("b", 10))
    assert not used.has_room("t", 9.9)
    assert used.has_room("t", 10)
    assert not used.use(grant("a", 20))
    assert used.use(grant("c", 30))
    assert not used.has_room("t", 19)
    assert used.has_room("t", 20)


def test_one_tenant_leaves_room_for_the_tokens_of_others() -> None:
    used = UsedTokens(max_count=3, max_tenant_count=2)
    assert used.use(grant("a", 20, "greedy"))
    assert used.use(grant("b", 20, "greedy"))
    assert not used.has_room("greedy", 0)
    assert used.has_room("modest", 0)
    assert used.use(grant("c", 10, "modest"))
    assert not used.has_room("third", 0)  # of all tenants together
    assert used.has_room("third", 10)
    assert not used.has_room("greedy", 10)
    assert used.has_room("greedy", 20)
