"""The keys of tenants and operators together, and the check of running sessions."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.edge.credential_rig import KeyStore
from support.edge.live_edge import HandSetClock
from support.fabric.in_process import no_task_left
from support.time_limits import WITHIN_S

from duplane.edge.access import ANONYMOUS, Caller, CallerKind, Scope, TenantLimits
from duplane.edge.credentials.authenticator import CredentialAuthenticator
from duplane.edge.credentials.key_files import KeyFiles
from duplane.edge.credentials.settings import CredentialSettings

# The clock's wall time is 2024-04-27T06:40:00Z.
IN_ONE_HOUR = "expires = 2024-04-27T07:40:00Z"


def found(result: Caller | str | None) -> Caller:
    assert isinstance(result, Caller), result
    return result


def test_key_names_its_tenant_and_its_end(tmp_path: Path) -> None:
    clock = HandSetClock()
    store = KeyStore(tmp_path, head="[default]\nsessions = 3\n")
    key = store.new("acme", IN_ONE_HOUR)
    keys = KeyFiles(CredentialSettings(api_keys=store.path), clock)
    caller = found(keys.find_tenant(key.text))
    assert caller.expires_s == pytest.approx(clock.now().monotonic_s + 3600, abs=0.001)
    assert replace(caller, expires_s=None) == Caller(
        CallerKind.TENANT,
        tenant="acme",
        credential=f"dpk_{key.key_id}",
        limits=TenantLimits(3),
    )
    assert keys.find_operator(key.text) is None
    assert keys.problem(caller.credential) == ""
    clock.advance(3600)
    assert keys.problem(caller.credential) == "the key has expired"
    assert keys.find_tenant(key.text) == "the key has expired"


def test_key_names_its_operator(tmp_path: Path) -> None:
    store = KeyStore(tmp_path, head="")
    key = store.add('operator = "eve"\nscopes = ["drain"]')
    keys = KeyFiles(CredentialSettings(operator_keys=store.path), HandSetClock())
    caller = found(keys.find_operator(key.text))
    assert (caller.kind, caller.subject, caller.tenant) == (CallerKind.OPERATOR, "eve", "")
    assert caller.scopes == {Scope.DRAIN}
    assert keys.find_tenant(key.text) is None


def test_other_credentials_do_not_end_with_a_file(tmp_path: Path) -> None:
    keys = KeyFiles(CredentialSettings(api_keys=KeyStore(tmp_path).path), HandSetClock())
    for credential in ("", "jwt:user 7", "admin token", "this machine"):
        assert keys.problem(credential) == ""
    assert keys.problem("dpk_0123456789ab") == "the key is revoked"


async def test_changed_file_is_read_and_sessions_are_checked_at_intervals(tmp_path: Path) -> None:
    store = KeyStore(tmp_path)
    key = store.new()
    settings = CredentialSettings(api_keys=store.path)
    credentials = CredentialAuthenticator(settings, "", HandSetClock())
    caller = found(credentials.keys.find_tenant(key.text))
    is_ended = asyncio.Event()

    def check() -> None:
        if credentials.problem(caller):
            is_ended.set()

    with no_task_left("duplane/edge/"):
        async with credentials.running(check, interval_s=0.001), asyncio.timeout(WITHIN_S):
            store.remove(key)
            await is_ended.wait()
    assert credentials.problem(ANONYMOUS) == ""


def test_missing_package_for_tokens_of_an_issuer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "duplane.edge.credentials.jwt_tokens", None)
    settings = CredentialSettings(
        jwks="https://issuer.example/jwks", jwt_issuer="i", jwt_audience="a"
    )
    with pytest.raises(ValueError, match=r"jwks: .* install duplane\[jwt\]"):
        CredentialAuthenticator(settings, "", HandSetClock())
