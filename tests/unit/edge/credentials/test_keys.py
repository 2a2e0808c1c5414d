"""API keys: their text, their file, and which of them may be used when."""

from __future__ import annotations

import hashlib
import hmac

import pytest

from duplane.edge.access import Scope, TenantLimits
from duplane.edge.credentials.keys import (
    KeyRing,
    narrower,
    new_key,
    parse_operator_keys,
    parse_tenant_keys,
)

KEY = new_key()
NOW_S = 1_800_000_000.0  # 2027-01-15
ENTRY = f'[[keys]]\nid = "{KEY.key_id}"\nsha256 = "{KEY.digest}"\n'


def of_tenant(rest: str = "", tenant: str = "acme") -> KeyRing:
    return parse_tenant_keys(f'{ENTRY}tenant = "{tenant}"\n{rest}', NOW_S)


def test_new_keys_have_256_random_bits_and_only_their_hash_is_kept() -> None:
    other = new_key()
    prefix, key_id, secret = KEY.text.split("_")
    assert (prefix, key_id, len(bytes.fromhex(secret))) == ("dpk", KEY.key_id, 32)
    assert KEY.digest == hashlib.sha256(KEY.text.encode()).hexdigest()
    assert {KEY.key_id, secret}.isdisjoint(other.text.split("_"))
    assert secret not in repr(KEY)


def test_key_is_found_by_its_whole_text_only() -> None:
    ring = of_tenant()
    found = ring.find(KEY.text)
    assert found
    assert found.holder == "acme"
    stranger = new_key().text
    wrong = f"dpk_{KEY.key_id}_{stranger.rpartition('_')[2]}"
    for text in (stranger, wrong, KEY.text.upper(), KEY.text[:-1], KEY.text + "0", "", "dpk_", "ü"):
        assert ring.find(text) is None, text


def test_unknown_and_wrong_keys_take_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    sha256, compare = hashlib.sha256, hmac.compare_digest
    monkeypatch.setattr(hashlib, "sha256", lambda *text: steps.append("hash") or sha256(*text))
    monkeypatch.setattr(
        hmac, "compare_digest", lambda *both: steps.append("compare") or compare(*both)
    )
    ring = of_tenant()
    for text in (KEY.text, f"dpk_{KEY.key_id}_{'0' * 64}", f"dpk_{'0' * 12}_{'0' * 64}", "x"):
        steps.clear()
        ring.find(text)
        assert steps == ["hash", "compare"], text


@pytest.mark.parametrize(
    ("rest", "problem"),
    [
        ("", ""),
        ("disabled = false", ""),
        ("disabled = true", "disabled"),
        ("expires = 2027-01-15T07:59:59Z", "expired"),  # NOW_S is 08:00:00
        ("expires = 2027-01-15T09:00:00+01:00", "expired"),
        ("expires = 2027-01-15T08:00:01Z", ""),
        ("expires = 2027-01-15", "expired"),
        ("expires = 2027-01-16", ""),
    ],
)
def test_state_of_a_key(rest: str, problem: str) -> None:
    ring = of_tenant(rest)
    found = ring.find(KEY.text)
    assert found
    for said in (found.problem(NOW_S), ring.problem(KEY.key_id, NOW_S)):
        assert problem in said
        assert bool(problem) == bool(said)
    assert "revoked" in ring.problem("000000000000", NOW_S)


def test_limits_of_tenants() -> None:
    text = "[default]\nsessions = 2\n[tenants.acme]\nsessions = 4\nwaiting = 0\nminutes = 60\n"
    ring = parse_tenant_keys(text, NOW_S)
    assert ring.limits_of("acme") == TenantLimits(4, 0, 60)
    assert ring.limits_of("another") == TenantLimits(2)
    assert of_tenant().limits_of("acme") == TenantLimits()
    assert set(of_tenant("[tenants.other-one]").tenants) == {"acme", "other-one"}


def test_claims_only_narrow_limits() -> None:
    assert narrower(TenantLimits(4, None, 60), TenantLimits(8, 1, None)) == TenantLimits(4, 1, 60)


def test_operator_has_scopes() -> None:
    text = f'{ENTRY}operator = "eve"\nscopes = ["read", "sessions"]\n'
    found = parse_operator_keys(text, NOW_S).find(KEY.text)
    assert found
    assert (found.holder, found.scopes) == ("eve", {Scope.READ, Scope.SESSIONS})


LIVE = "\n".join(
    f'[[keys]]\nid = "{key.key_id}"\nsha256 = "{key.digest}"\ntenant = "acme"'
    for key in (new_key(), new_key())
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "neither keys nor tenants"),
        ("keys", "Expected"),
        ("keys = 1", "keys must be tables"),
        ("keys = [1]", r"keys\[0\] must be a table"),
        ("other = 1", "other is unknown"),
        ("keys = " + "[" * 100_000, "too many lists"),
        (ENTRY, r"keys\[0\].tenant must"),
        (f'{ENTRY}tenant = "a b"', r"keys\[0\].tenant must"),
        (f'{ENTRY}tenant = "other"', r"keys\[0\].tenant must"),
        (f'{ENTRY}tenant = "a"\nscopes = ["read"]', r"keys\[0\].scopes is unknown"),
        (f'{ENTRY}tenant = "a"\nexpires = "soon"', r"keys\[0\].expires must"),
        (f'{ENTRY}tenant = "a"\nexpires = 2027-01-01T00:00:00', r"keys\[0\].expires must"),
        (f'{ENTRY}tenant = "a"\ndisabled = 1', r"keys\[0\].disabled must"),
        (f'{ENTRY}tenant = "a"\n{ENTRY}tenant = "b"', r"keys\[1\].id is there twice"),
        ('[[keys]]\nid = "A"\nsha256 = "00"\ntenant = "a"', r"keys\[0\].id must"),
        ('[[keys]]\nid = "0123456789ab"\nsha256 = "0"\ntenant = "a"', r"keys\[0\].sha256 must"),
        (f'{ENTRY}tenant = "acme"\n{LIVE}', "tenant acme has 3 live keys"),
        ("[tenants.a]\nsessions = -1", "tenants.a.sessions must"),
        ("[tenants.a]\nsessions = 1_000_000_001", "tenants.a.sessions must"),
        ("[tenants.a]\nsessions = true", "tenants.a.sessions must"),
        ("[tenants.a]\nhours = 1", "tenants.a.hours is unknown"),
        ("[tenants.other]", "tenants.other is not a name"),
        ("[default]\nminutes = 1.5", "default.minutes must"),
    ],
)
def test_fault_in_a_file_is_named(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_tenant_keys(text, NOW_S)


@pytest.mark.parametrize("scopes", ['"read"', "[]", '["all"]', "[1]"])
def test_operator_without_known_scopes_is_refused(scopes: str) -> None:
    with pytest.raises(ValueError, match=r"keys\[0\].scopes must"):
        parse_operator_keys(f'{ENTRY}operator = "eve"\nscopes = {scopes}', NOW_S)


def test_disabled_and_expired_keys_do_not_count_as_live() -> None:
    ended = f'{ENTRY}tenant = "acme"\ndisabled = true\n'
    assert len(parse_tenant_keys(f"{ended}{LIVE}", NOW_S).keys) == 3
