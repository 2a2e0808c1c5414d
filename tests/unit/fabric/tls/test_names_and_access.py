"""SPIFFE IDs, the table of roles, and deny lists."""

from __future__ import annotations

from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2

from duplane.fabric.tls.access import ALLOWED, FOR_OPERATORS, refusal
from duplane.fabric.tls.deny_list import DenyList, parse_entries
from duplane.fabric.tls.identity import Identity, Role, parse_identity
from duplane.fabric.tls.settings import FabricTlsSettings
from duplane.fabric.v1 import admin_pb2, lease_pb2, registry_pb2, session_pb2

EDGE = Identity("duplane.internal", Role.EDGE, "e1")


def test_every_rpc_of_the_contract_has_its_roles() -> None:
    served = {
        f"/{service.full_name}/{method.name}"
        for file in (admin_pb2, lease_pb2, registry_pb2, session_pb2)
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    health = {rpc for rpc in ALLOWED if rpc.startswith("/grpc.health.v1.Health/")}
    names = {one.name for one in health_pb2.DESCRIPTOR.services_by_name["Health"].methods}
    assert {rpc.rpartition("/")[2] for rpc in health} <= names
    assert set(ALLOWED) - health == served
    assert served >= FOR_OPERATORS
    assert all(ALLOWED.values())


@pytest.mark.parametrize("role", Role)
def test_unknown_rpc_is_refused_to_every_role(role: Role) -> None:
    for rpc in ("/duplane.fabric.v1.AdminService/Future", "", "/", "AcquireLease"):
        assert refusal(rpc, role, "somebody")


def test_identity_is_the_same_after_a_round_trip() -> None:
    for role in Role:
        identity = Identity("a.b-c_d", role, "Host_1.x-2")
        assert parse_identity(str(identity)) == identity
        assert len(identity.holder) == 32
    assert EDGE.holder != Identity("duplane.internal", Role.EDGE, "e2").holder


@pytest.mark.parametrize(
    "text",
    [
        "",
        "spiffe://duplane.internal/duplane/edge",
        "spiffe://duplane.internal/duplane/edge/",
        "spiffe://duplane.internal/duplane/edge/a/b",
        "spiffe://duplane.internal/duplane/edge/a\n",
        "spiffe://duplane.internal/duplane/root/a",
        "spiffe://duplane.internal/duplane/EDGE/a",
        "spiffe://Duplane.internal/duplane/edge/a",
        "spiffe:///duplane/edge/a",
        "spiffe://duplane.internal/duplane/edge/a%2fb",
        "spiffe://duplane.internal/duplane/edge/" + "a" * 129,
        "https://duplane.internal/duplane/edge/a",
        "xspiffe://duplane.internal/duplane/edge/a",
    ],
)
def test_other_names_are_no_identities(text: str) -> None:
    with pytest.raises(ValueError, match="is not spiffe://"):
        parse_identity(text)


def test_worker_has_the_name_of_its_certificate_or_begins_with_it() -> None:
    worker = Identity("d", Role.WORKER, "gpu-1")
    assert worker.may_register_as("gpu-1")
    assert worker.may_register_as("gpu-1-4711-ab")
    for other in ("gpu-11", "gpu", "gpu-", "GPU-1", "x-gpu-1", ""):
        assert not worker.may_register_as(other)


def test_deny_list_has_spiffe_ids_and_fingerprints() -> None:
    entries = parse_entries(f"# all of these\n\n{EDGE} # lost\n SHA256:{'AB' * 32}\n", "f")
    assert entries == {str(EDGE), f"sha256:{'ab' * 32}"}
    for line in ("edge", "sha256:ab", f"sha512:{'ab' * 32}", "spiffe://d/duplane/root/x"):
        with pytest.raises(ValueError, match="f, line 2"):
            parse_entries(f"#\n{line}", "f")


def test_deny_list_with_an_error_leaves_the_former_one(tmp_path: Path) -> None:
    file = tmp_path / "deny"
    file.write_text(str(EDGE))
    deny, changes = DenyList(file), list[bool]()
    deny.on_change = lambda: changes.append(True)
    file.write_text("nobody at all")
    assert not deny.reload_if_changed()
    assert deny.refuses(str(EDGE), b"")
    assert not changes
    file.write_text("")
    assert deny.reload_if_changed()
    assert not deny.refuses(str(EDGE), b"")
    assert changes
    with pytest.raises(ValueError, match=r"^fabric_deny: .*missing"):
        DenyList(tmp_path / "missing")


def test_settings_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^fabric_plaintext"):
        FabricTlsSettings(fabric_tls=tmp_path, fabric_plaintext=True)
    with pytest.raises(ValueError, match=r"^fabric_deny"):
        FabricTlsSettings(fabric_deny=tmp_path / "deny")
    for domain in ("", "UPPER", "a/b", "a" * 256):
        with pytest.raises(ValueError, match=r"^fabric_trust_domain"):
            FabricTlsSettings(fabric_trust_domain=domain)
