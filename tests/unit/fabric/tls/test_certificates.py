"""Files of certificates: what would make them fail is named before they are used."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from support.fabric.tls_fabric import FabricCertificates
from support.tools.command import run_command

from duplane.fabric.process import StartError
from duplane.fabric.tls.certificates import CA_FILE, CHAIN_FILE, KEY_FILE, problems, read_files
from duplane.fabric.tls.credentials import FabricCredentials, open_credentials
from duplane.fabric.tls.identity import Role
from duplane.fabric.tls.issuing import Authority
from duplane.fabric.tls.settings import DEFAULT_TRUST_DOMAIN, FabricTlsSettings

DAY = timedelta(days=1)


@pytest.fixture
def certificates(tmp_path: Path) -> FabricCertificates:
    return FabricCertificates(tmp_path)


def found(directory: Path, now: datetime | None = None) -> str:
    files = read_files(directory)
    return "; ".join(problems(files, now, role=Role.EDGE, trust_domain=DEFAULT_TRUST_DOMAIN))


def test_issued_certificate_has_no_problem(certificates: FabricCertificates) -> None:
    assert not found(certificates.issue(Role.EDGE))
    certificates.bundle += Authority.make().pem
    assert not found(certificates.issue(Role.EDGE))


def of_another_role(certificates: FabricCertificates) -> Path:
    return certificates.issue(Role.WORKER)


def of_another_domain(certificates: FabricCertificates) -> Path:
    return certificates.issue(Role.EDGE, trust_domain="elsewhere")


def of_another_ca(certificates: FabricCertificates) -> Path:
    certificates.bundle = Authority.make().pem
    return certificates.issue(Role.EDGE)


def with_an_ed25519_key(certificates: FabricCertificates) -> Path:
    return certificates.issue(Role.EDGE, key=Ed25519PrivateKey.generate())


def on_another_curve(certificates: FabricCertificates) -> Path:
    return certificates.issue(Role.EDGE, key=ec.generate_private_key(ec.SECP256K1()))


def expired(certificates: FabricCertificates) -> Path:
    return certificates.issue(Role.EDGE, now=datetime.now(UTC) - 2 * DAY, life=DAY)


def of_tomorrow(certificates: FabricCertificates) -> Path:
    return certificates.issue(Role.EDGE, now=datetime.now(UTC) + 2 * DAY)


def with_one_ca_twice(certificates: FabricCertificates) -> Path:
    certificates.bundle *= 2
    return certificates.issue(Role.EDGE)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (of_another_role, "for the role worker, must be for edge"),
        (of_another_domain, "trust domain elsewhere"),
        (of_another_ca, f"no valid certificate in {CA_FILE} has issued"),
        (with_an_ed25519_key, "neither RSA nor ECDSA on P-256"),
        (on_another_curve, "neither RSA nor ECDSA on P-256"),
        (expired, "has expired"),
        (of_tomorrow, "valid only from"),
        (with_one_ca_twice, "same subject"),
    ],
)
def test_certificate_that_peers_would_refuse_is_not_used(
    certificates: FabricCertificates, make: Callable[[FabricCertificates], Path], problem: str
) -> None:
    directory = make(certificates)
    assert problem in found(directory)
    with pytest.raises(StartError, match=f"^fabric_tls: .*{problem}"):
        open_credentials(FabricTlsSettings(fabric_tls=directory), Role.EDGE)


def test_key_that_others_can_read_is_refused(certificates: FabricCertificates) -> None:
    directory = certificates.issue(Role.EDGE)
    (directory / KEY_FILE).chmod(0o644)
    with pytest.raises(StartError, match=rf"^fabric_tls: .*{KEY_FILE}.*chmod"):
        open_credentials(FabricTlsSettings(fabric_tls=directory), Role.EDGE)


def test_unreadable_files_are_named(certificates: FabricCertificates) -> None:
    directory = certificates.issue(Role.EDGE)
    for name in (CHAIN_FILE, KEY_FILE, CA_FILE):
        content = (directory / name).read_bytes()
        for broken in (b"", b"no PEM", content[: len(content) // 2]):
            (directory / name).write_bytes(broken)
            with pytest.raises(ValueError, match=name):
                read_files(directory)
        (directory / name).unlink()
        with pytest.raises(ValueError, match=name):
            read_files(directory)
        (directory / name).write_bytes(content)


def test_bad_files_leave_the_former_certificate(certificates: FabricCertificates) -> None:
    directory = certificates.issue(Role.EDGE)
    credentials = FabricCredentials(directory, Role.EDGE, DEFAULT_TRUST_DOMAIN)
    former_key = (directory / KEY_FILE).read_bytes()
    former = credentials.channel_credentials
    certificates.issue(Role.EDGE)
    new_key = (directory / KEY_FILE).read_bytes()
    (directory / KEY_FILE).write_bytes(former_key)  # between the replacements of the files
    assert not credentials.reload_if_changed()
    assert credentials.version == 1
    assert credentials.channel_credentials is former
    (directory / KEY_FILE).write_bytes(new_key)
    assert credentials.reload_if_changed()
    assert credentials.version == 2


# A key on the curve sect113r1, which no TLS of today supports.
RARE_KEY = b"""-----BEGIN PRIVATE KEY-----
MCwCAQAwEAYHKoZIzj0CAQYFK4EEAAIEFTATAgEBBA4BAQEBAQEBAQEBAQEBAQ==
-----END PRIVATE KEY-----
"""


def test_key_of_an_unknown_type_leaves_the_former_certificate(
    certificates: FabricCertificates,
) -> None:
    directory = certificates.issue(Role.EDGE)
    credentials = FabricCredentials(directory, Role.EDGE, DEFAULT_TRUST_DOMAIN)
    (directory / KEY_FILE).write_bytes(RARE_KEY)
    assert not credentials.reload_if_changed()
    assert credentials.version == 1
    with pytest.raises(StartError, match=KEY_FILE):
        open_credentials(FabricTlsSettings(fabric_tls=directory), Role.EDGE)


def test_commands_make_show_and_check_certificates(tmp_path: Path) -> None:
    directory = tmp_path / "pki"
    code, output = run_command("certs", "dev", str(directory), "--name", "h1", "--days", "2")
    assert code == 0, output
    assert (directory / "ca.key").stat().st_mode & 0o777 == 0o600
    for role in Role:
        assert (directory / role / KEY_FILE).stat().st_mode & 0o777 == 0o600
        code, output = run_command("certs", "check", str(directory / role), "--role", role)
        assert code == 0, output
        assert f"spiffe://duplane.internal/duplane/{role}/h1 is usable until" in output
    code, output = run_command("certs", "check", str(directory / "edge"), "--role", "worker")
    assert code == 1
    assert "must be for worker" in output
    first = (directory / "edge" / CHAIN_FILE).read_bytes()
    ca = (directory / CA_FILE).read_bytes()
    code, output = run_command("certs", "dev", str(directory), "--role", "edge", "--name", "h2")
    assert code == 0, output
    assert (directory / CA_FILE).read_bytes() == ca
    assert (directory / "edge" / CHAIN_FILE).read_bytes() != first
    code, output = run_command("certs", "show", str(directory / "edge" / CHAIN_FILE))
    assert code == 0, output
    assert "duplane/edge/h2" in output
    assert "edge.duplane.internal" in output
    assert "sha256:" in output
    assert "days left" in output
    code, output = run_command("certs", "dev", str(directory), "--role", "root")
    assert code == 2
    code, output = run_command("certs", "show", str(directory / "ca.key"))
    assert code == 1
