"""The certificate that an edge makes itself: its names, its life, and what its CA may sign."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from duplane.edge.transport.self_signed import LEAF_LIFE, SelfSigned, ensure, own_names
from duplane.fabric.tls.issuing import CA_KEY_FILE

NAMES = (x509.DNSName("localhost"), x509.IPAddress(ip_address("192.168.1.5")))
DAY = timedelta(days=1)
NOW = datetime.now(UTC)


def names_of(files: SelfSigned) -> set[x509.GeneralName]:
    leaf = x509.load_pem_x509_certificate(files.chain.read_bytes())
    return set(leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)


def contents(files: SelfSigned) -> Sequence[bytes]:
    return [path.read_bytes() for path in (files.ca, files.chain, files.key)]


def test_certificate_has_the_names_and_only_its_owner_reads_the_keys(tmp_path: Path) -> None:
    files = ensure(tmp_path / "new/tls", NAMES, NOW)
    leaf = x509.load_pem_x509_certificate(files.chain.read_bytes())
    assert names_of(files) == set(NAMES)
    assert leaf.not_valid_after_utc - NOW < timedelta(days=398)
    key = load_pem_private_key(files.key.read_bytes(), None)
    assert key.public_key() == leaf.public_key()
    for path in (files.key, files.directory / CA_KEY_FILE):
        assert path.stat().st_mode & 0o077 == 0
    assert files.directory.stat().st_mode & 0o077 == 0


def test_second_start_changes_nothing(tmp_path: Path) -> None:
    first = contents(ensure(tmp_path, NAMES, NOW))
    assert contents(ensure(tmp_path, NAMES, NOW + 30 * DAY)) == first


def test_certificate_is_made_again_before_it_ends_by_the_same_ca(tmp_path: Path) -> None:
    ca, chain, _ = contents(ensure(tmp_path, NAMES, NOW))
    files = ensure(tmp_path, NAMES, NOW + LEAF_LIFE - 80 * DAY)
    assert files.ca.read_bytes() == ca
    assert files.chain.read_bytes() != chain


def test_private_address_that_is_new_needs_no_new_ca(tmp_path: Path) -> None:
    ca, *_ = contents(ensure(tmp_path, NAMES, NOW))
    moved = (*NAMES, x509.IPAddress(ip_address("10.3.2.1")), x509.DNSName("laptop.local"))
    files = ensure(tmp_path, moved, NOW)
    assert files.ca.read_bytes() == ca
    assert names_of(files) == set(moved)


@pytest.mark.parametrize(
    "name", [x509.DNSName("talk.example"), x509.IPAddress(ip_address("8.8.8.8"))]
)
def test_name_that_the_ca_may_not_sign_needs_a_new_one(
    tmp_path: Path, name: x509.DNSName | x509.IPAddress
) -> None:
    ca, *_ = contents(ensure(tmp_path, NAMES, NOW))
    files = ensure(tmp_path, (*NAMES, name), NOW)
    assert files.ca.read_bytes() != ca
    assert names_of(files) == {*NAMES, name}


def test_ca_is_made_again_before_it_ends(tmp_path: Path) -> None:
    ca, *_ = contents(ensure(tmp_path, NAMES, NOW))
    assert ensure(tmp_path, NAMES, NOW + 3500 * DAY).ca.read_bytes() != ca


def test_keys_that_others_may_read_are_refused(tmp_path: Path) -> None:
    files = ensure(tmp_path, NAMES, NOW)
    for path in (files.key, tmp_path / CA_KEY_FILE):
        path.chmod(0o644)
        with pytest.raises(ValueError, match="tls_state: other users"):
            ensure(tmp_path, NAMES, NOW)
        path.chmod(0o600)


def test_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"tls_state: .*file"):
        ensure(tmp_path / "file", NAMES, NOW)


def test_own_names_are_those_of_this_machine_and_of_the_settings() -> None:
    names = own_names(["0.0.0.0", "talk.example", "*.example", "*", "192.168.7.7"])
    texts = {str(name.value) for name in names}
    assert {"localhost", "127.0.0.1", "::1", "talk.example", "*.example", "192.168.7.7"} <= texts
    assert not {"0.0.0.0", "*"} & texts
