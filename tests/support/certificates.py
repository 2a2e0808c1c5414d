"""Makes TLS certificates for tests."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID

_DAY = timedelta(days=1)


def write_certificate(
    directory: Path, name: str, *, is_rsa: bool = False, host_names: Sequence[str] = ()
) -> tuple[Path, Path]:
    """Write a self-signed certificate for 127.0.0.1 and these hosts.

    Each existing file is replaced atomically.
    """
    key = (
        rsa.generate_private_key(65537, 2048) if is_rsa else ec.generate_private_key(ec.SECP256R1())
    )
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - _DAY)
        .not_valid_after(now + _DAY)
        .add_extension(
            x509.SubjectAlternativeName(
                [
                    x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
                    *map(x509.DNSName, host_names),
                ]
            ),
            critical=False,
        )
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    paths = directory / "cert.pem", directory / "key.pem"
    for path, content in zip(paths, (certificate.public_bytes(pem), private), strict=True):
        fresh = path.with_suffix(".new")
        fresh.touch(mode=0o600)
        fresh.write_bytes(content)
        fresh.replace(path)
    return paths
