"""Checks certificates and keys: the role, the key, the time left."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509

from duplane.fabric.secret_files import check_secret_file
from duplane.fabric.tls.certificates import (
    CA_FILE,
    CHAIN_FILE,
    KEY_FILE,
    TIME_FORMAT,
    check_pair,
    identity_of,
    parse_certificates,
    problems,
    read_files,
)
from duplane.fabric.tls.identity import Role
from duplane.fabric.tls.settings import FabricTlsSettings
from duplane.tools.doctor.findings import Finding, error, ok, warning

CHECK = "certificates"
_SOON = 0.25  # share of the life of a certificate that is left when it should be replaced
_FABRIC = "--fabric-tls"
_MAX_BYTES = 1024 * 1024


def of_fabric(
    settings: FabricTlsSettings, role: Role, worker_id: str | None = None
) -> Iterator[Finding]:
    """Check the files of --fabric-tls, and a worker's id against the name in its certificate."""
    directory = settings.fabric_tls
    if directory is None:
        yield ok(CHECK, _FABRIC, "this process uses no TLS inside the fabric")
        return
    try:
        check_secret_file(directory / KEY_FILE, "fabric_tls")
        files = read_files(directory)
    except ValueError as problem:
        yield error(CHECK, _FABRIC, str(problem))
        return
    found = list(problems(files, role=role, trust_domain=settings.fabric_trust_domain))
    for problem in found:
        yield error(CHECK, _FABRIC, f"{directory}: {problem}")
    if found:
        return
    identity = identity_of(files.leaf)
    yield from _life(files.leaf, _FABRIC, f"{directory / CHAIN_FILE}, {identity}")
    for ca in files.cas:
        name = ca.subject.rfc4514_string()
        yield from _life(ca, _FABRIC, f"{directory / CA_FILE}, {name}")
    if worker_id is not None and not identity.may_register_as(worker_id):
        yield error(
            CHECK,
            "--worker-id",
            f"the id {worker_id!r} is neither {identity.name!r}, the name in the certificate, nor"
            f" begins with '{identity.name}-'",
        )


def of_pair(chain: Path | None, key: Path | None, chain_flag: str, key_flag: str) -> list[Finding]:
    """Check a certificate chain and its key; nothing if there are none."""
    if chain is None or key is None:
        return []
    try:
        chain_pem, key_pem = _read(chain), _read(key)
        leaf = parse_certificates(chain_pem, str(chain))[0]
    except (OSError, ValueError) as problem:
        return [error(CHECK, chain_flag, str(problem))]
    try:
        check_secret_file(key, key_flag)
        check_pair(chain_pem, key_pem, str(key))
    except ValueError as problem:
        return [error(CHECK, key_flag, str(problem))]
    return list(_life(leaf, chain_flag, str(chain)))


def of_bundle(file: Path | None, flag: str) -> list[Finding]:
    """Check the certificates of CAs; nothing if there is no file."""
    if file is None:
        return []
    try:
        found = parse_certificates(_read(file), str(file))
    except (OSError, ValueError) as problem:
        return [error(CHECK, flag, str(problem))]
    names = ((one, f"{file}, {one.subject.rfc4514_string()}") for one in found)
    return [finding for one, name in names for finding in _life(one, flag, name)]


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_MAX_BYTES)


def _life(certificate: x509.Certificate, flag: str, name: str) -> Iterator[Finding]:
    now = datetime.now(UTC)
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    days = (end - now) / timedelta(days=1)
    if now >= end:
        yield error(CHECK, flag, f"{name}: it has expired at {end:{TIME_FORMAT}}")
    elif now < begin:
        yield error(CHECK, flag, f"{name}: it is valid only from {begin:{TIME_FORMAT}}")
    elif (end - now) < _SOON * (end - begin):
        yield warning(CHECK, flag, f"{name}: replace it, {days:.1f} days are left")
    else:
        yield ok(CHECK, flag, f"{name}: {days:.1f} days are left")
