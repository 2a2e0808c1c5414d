"""The table of session kinds covers the contract's enum."""

from __future__ import annotations

from duplane.fabric.kinds import KIND_NAMES, KINDS_BY_NAME, kind_name
from duplane.fabric.v1 import lease_pb2


def test_every_kind_of_the_contract_has_one_name() -> None:
    kinds = set(lease_pb2.SessionKind.values()) - {lease_pb2.SESSION_KIND_UNSPECIFIED}
    assert set(KIND_NAMES) == kinds
    assert {KINDS_BY_NAME[name] for name in KIND_NAMES.values()} == kinds


def test_kind_of_a_newer_peer_is_unknown() -> None:
    assert kind_name(lease_pb2.SESSION_KIND_UNSPECIFIED) == "unknown"
